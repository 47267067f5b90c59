"""Requests to Chunks: tokenizer, scheduler, KV blocks, runner, sampler."""
