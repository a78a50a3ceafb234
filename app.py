"""Start the page: `python app.py`, which is `python -m playground serve`. A Hugging Face Space runs this file."""
import sys

from playground.cli import main

if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]]))
