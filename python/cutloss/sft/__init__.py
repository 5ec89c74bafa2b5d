"""Supervised fine-tuning with Tunix and cutloss: the demo behind `cutloss-demo`.

gemma3.py: weights, tokenizer, model. data.py: pairs, split, batches. arm.py: one training run in a process of its own.
hlo.py: what the compiled step holds. report.py: table, CSV and plot. demo.py: the command.
"""
