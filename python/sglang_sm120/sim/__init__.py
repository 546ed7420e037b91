"""An out-of-tree SGLang platform on the CPU, and the tiny models it serves."""
