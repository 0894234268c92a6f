"""Random two-layer models of transformers' architectures, small enough for any test."""

import torch
import transformers

from torch_flash_mps.integrations.transformers import NAME, register


def tiny(name, **options):
    """A model of one architecture on the CPU, with eager attention. `options`: of its config."""
    sizes = {
        "vocab_size": 97,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "max_position_embeddings": 64,
    }
    config_class, model_class = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "bert": (transformers.BertConfig, transformers.BertModel),
        "gemma2": (transformers.Gemma2Config, transformers.Gemma2ForCausalLM),
        "gemma3": (transformers.Gemma3TextConfig, transformers.Gemma3ForCausalLM),
        "deepseek_v3": (transformers.DeepseekV3Config, transformers.DeepseekV3ForCausalLM),
        "gpt_oss": (transformers.GptOssConfig, transformers.GptOssForCausalLM),
        "qwen2_moe": (transformers.Qwen2MoeConfig, transformers.Qwen2MoeForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
        "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
        "bart": (transformers.BartConfig, transformers.BartForConditionalGeneration),
        "t5": (transformers.T5Config, transformers.T5ForConditionalGeneration),
        "whisper": (transformers.WhisperConfig, transformers.WhisperForConditionalGeneration),
        "hubert": (transformers.HubertConfig, transformers.HubertModel),
        "vit": (transformers.ViTConfig, transformers.ViTForImageClassification),
        "bloom": (transformers.BloomConfig, transformers.BloomForCausalLM),
        "nllb_moe": (transformers.NllbMoeConfig, transformers.NllbMoeForConditionalGeneration),
    }[name]
    torch.manual_seed(0)
    config = config_class(**(sizes | options))
    return model_class._from_config(config, attn_implementation="eager").eval()


def fused(model, device):
    """The same model on another device, with the Metal kernels for attention."""
    register()
    model.to(device)
    model.set_attn_implementation(NAME)
    return model
