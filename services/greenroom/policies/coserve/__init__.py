"""CoServe (ASPLOS 2025): which executor serves a request to whole models, in which order, and who leaves memory."""
