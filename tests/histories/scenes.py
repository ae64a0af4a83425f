"""All scenes of real runs, by the name of their recording."""

from pathlib import Path

from tests.histories import scenes_plain, scenes_processes, scenes_store

REAL = {**scenes_plain.SCENES, **scenes_processes.SCENES, **scenes_store.SCENES}
#: Logs name the paths of their run: the same ones wherever it was recorded.
STAGE = Path("/tmp/kvferry-histories")
