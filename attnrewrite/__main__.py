"""python -m attnrewrite"""

import sys

from attnrewrite.cli.main import main

sys.exit(main())
