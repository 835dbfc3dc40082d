"""python -m attnrewrite"""

import sys

from attnrewrite.cli import main

sys.exit(main())
