"""How each type of component is drawn: its pads and print, and its body, whole or with a defect of its own."""
