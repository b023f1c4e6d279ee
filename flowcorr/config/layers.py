"""Linear layers of transformers, by the ends of their names in diffusers, as adapters choose them."""

ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")
"""Layers of an attention over one sequence, within it."""
JOINT_ATTENTION = tuple(
    f"attn.{layer}" for layer in (*ATTENTION, "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
)
"""Layers of an attention over image and text tokens, which the adapters of most families take."""
JOINT_FEED_FORWARD = ("ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2")
"""Layers of the feed-forward networks beside it: one for image tokens, one for text tokens."""
