"""How the bundled model is measured, and its card: `python -m greenroom.demo.evaluate MODEL --out FILE`."""
