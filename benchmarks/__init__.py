"""Speed and scaling, one file a question; `results/` holds what they measured, with the machine they ran on."""
