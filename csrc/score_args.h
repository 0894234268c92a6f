// What a call does to its scores and probabilities: softcap, ALiBi slopes, sinks, dropout. Part of
// attn_args.h's judgement of inputs.
#pragma once

#include "attn_args.h"

namespace flash_mps {

// Throws for numbers that no option may have.
void check_options(const char* op, const AttnOptions& options);

// Fills softcap, alibi_slopes and sinks of a problem whose sizes are known. Throws like check_inputs().
void take_score_options(const char* op, const AttnOptions& options, AttnProblem& problem);

// Fills dropout_p and the key of its random numbers, which is drawn where the options have no rng_state.
void take_dropout(const char* op, const AttnOptions& options, AttnProblem& problem);

// What one call's random numbers follow from: int32 [2] on the CPU, from torch's default generator. That
// is the one that activation checkpointing restores; it does not know the generator of an mps device.
at::Tensor draw_rng_state();

// Random words below this drop their pair.
uint32_t dropout_threshold(const AttnProblem& problem);
float dropout_scale(const AttnProblem& problem);

// The lse of rows that see no key: -inf, or the sink of their head.
void fill_empty_lse(const AttnProblem& problem, const at::Tensor& lse);

}  // namespace flash_mps
