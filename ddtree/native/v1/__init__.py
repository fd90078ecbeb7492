"""Adapter for vLLM's V1 model runner (``vllm/v1/worker/gpu_model_runner.py``), proven on 0.23.0."""
