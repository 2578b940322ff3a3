"""How the bundled model is trained: `python -m greenroom.demo.train --out DIR`."""
