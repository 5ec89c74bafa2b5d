"""Supervised fine-tuning with Tunix and cutloss: the command `cutloss-sft`, and the demo, which is a preset of it.

config.py: what a run is to do. families.py, models.py, tokenizers.py, gguf_file.py, gguf_tokenizer.py,
gemma3.py: the model. data.py: pairs, split, batches. trainer.py: Tunix's trainer. run.py, folder.py: one run and its folder. generation.py: answers, BLEU, chrF.
fit.py: what fits. hlo.py: what the compiled step holds. report.py, display.py: what is shown. cli.py: the command. demo.py,
arm.py: the demo.
"""
