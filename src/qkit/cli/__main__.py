"""``python -m qkit.cli``: same as ``qkit``. The supervisor starts its workers with it."""

from qkit.cli import main

if __name__ == "__main__":
    main()
