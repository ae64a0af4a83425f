"""``python -m kvworker``."""

from kvworker.cli import main

if __name__ == "__main__":
    main()
