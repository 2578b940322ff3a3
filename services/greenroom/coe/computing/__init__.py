"""An executor's work: from inputs and an expert's weights to results."""
