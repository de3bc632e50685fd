"""Rollout roles over engines of others: vLLM, SGLang, and transformers, which needs no device."""
