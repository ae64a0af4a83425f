"""``kvreplay``: what happened, why, and does it obey the rules, from kvferry's event logs.

Works on any machine: it imports the two pure cores and the contract, and neither torch, vLLM,
Mooncake nor ZeroMQ. Logs are untrusted data.
"""
