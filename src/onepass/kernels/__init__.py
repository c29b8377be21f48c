"""The Triton families: device code (`math`, `row`, `tile`, `combine`) and what launches it (`launch`, `forward`)."""
