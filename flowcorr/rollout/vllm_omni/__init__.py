"""The rollout engine `vllm_omni`, which samples in processes of its own.

`engine` and `client` run in the trainer. `pipeline` and `worker` run in vllm-omni's worker processes. `request`
defines the messages between them.
"""
