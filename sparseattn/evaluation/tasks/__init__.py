"""Long prompts with known answers, the engines that answer them, and how answers are scored and recorded."""
