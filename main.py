"""`python main.py --arch vit --cssm hgru_bi` trains a CSSM vision model; `--help` lists the flags."""

import sys

from cssm.cli import main

if __name__ == "__main__":
    sys.exit(main())
