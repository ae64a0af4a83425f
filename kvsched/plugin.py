"""Makes ``"kv_connector": "KVFerryConnector"`` known to vLLM.

vLLM loads the entry point group ``vllm.general_plugins`` in every one of its processes; the
function may run more than once in one process.
"""

CONNECTOR = "KVFerryConnector"


def register() -> None:
    """Register the connector with vLLM's factory, once."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    # Asking the factory by name would load the connector's module.
    if CONNECTOR not in KVConnectorFactory._registry:  # noqa: SLF001
        KVConnectorFactory.register_connector(CONNECTOR, "kvsched.connector", CONNECTOR)
