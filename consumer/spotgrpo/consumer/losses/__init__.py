"""The loss as small parts that compose: ratio level, clip, corrections, aggregation, penalties.

A step is one optimizer step on groups that other policies sampled, so there are two logprobs of every token: log μ,
of the policy version that sampled it, as its engine computed it; and log π, of the policy that is trained.
Published methods speak of π_old, the policy before the first of several updates on one batch. With one update a
batch the trainer's own π_old *is* π, without its gradient, so what they do maps onto an anchor π_a between the two
(``loss.anchor``):

    log π_a = α log μ + (1 − α) log sg(π)          ρ = π / π_a          w = π_a / μ

sg stops the gradient, ρ is what the clip sees, and w is a weight without gradient, so that ρ w = π/μ in value.

========== ==================== ======================================================================================
anchor     α                    what it is
========== ==================== ======================================================================================
behaviour  1                    π_old := μ, w = 1. Ratio and clip span the whole lag and the engine's rounding. Equal to
                                the papers where μ is the trainer's π_old to the last bit; else the clip also cuts what
                                engine and trainer disagree on.
current    0                    π_old := sg(π): ρ = 1, no clip ever binds, w = π/μ does all. For one update a batch
                                exactly what systems do that compute π_old again before they train (TIS, IcePop).
proximal   1 / max(lag, 1)      decoupled PPO with the proximal policy interpolated between versions (A-3PO). An
                                approximation: the policy one version back is not computed. The lag is that of each
                                token's version; right after a takeover, versions that were given up count by number.
========== ==================== ======================================================================================

Corrections look at w; where the anchor is the behaviour policy, at ρ itself, which is the same π/μ. What differs
from the papers on purpose:

- Means are over what is trained: groups without reward variance and rollouts without a reward are in no
  denominator. DAPO's sampling excludes the former too; GRPO and TRL count both, with advantage 0. The constant of
  Dr. GRPO counts the completions that a step asks for.
- KL to the base is off in every preset (DeepSeekMath's GRPO has 0.04).
- GSPO's clip is 3e-4 and 4e-4 wide: what engine and trainer disagree on must be well below.
- M2PO masks, as its paper has it; its authors' code clips there instead, never tighter than 0.7 and 1.5.

Modules without torch: ``objective`` (the choice of parts, with the sizes of a run), ``overlong``, ``plan`` (what the
micro-batches of a step must know of each other). With torch: ``ratios``, ``clipping``, ``corrections``,
``penalties``, each a few functions of flat token arrays, and ``composed``, which puts them together. The parts that
need the whole step are per-sample facts of the plan, known before anything is computed (aggregation weights, GEPO's
expectations, the batch's deviation), or within a sequence, which no micro-batch cuts (sequence ratios, rejection).
Only M2PO's limit depends on the trained policy: it costs a forward pass of the step before its gradients.
"""
