"""The llama.cpp library behind Python objects: model, tokenizer, context, memory, taps, state."""
