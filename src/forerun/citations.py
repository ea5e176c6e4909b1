"""BibTeX entries of the papers behind the parts, keyed by a short name."""

from __future__ import annotations

BIBTEX: dict[str, str] = {
    "leviathan2023": """\
@inproceedings{leviathan2023speculative,
  title     = {Fast Inference from Transformers via Speculative Decoding},
  author    = {Leviathan, Yaniv and Kalman, Matan and Matias, Yossi},
  booktitle = {International Conference on Machine Learning},
  year      = {2023},
  note      = {arXiv:2211.17192}
}
""",
    "chen2023": """\
@article{chen2023sampling,
  title   = {Accelerating Large Language Model Decoding with Speculative Sampling},
  author  = {Chen, Charlie and Borgeaud, Sebastian and Irving, Geoffrey and
             Lespiau, Jean-Baptiste and Sifre, Laurent and Jumper, John},
  journal = {arXiv preprint arXiv:2302.01318},
  year    = {2023}
}
""",
    "gammatune2025": """\
@article{gautam2025gammatune,
  title   = {Token-Driven {GammaTune}: Adaptive Calibration for Enhanced Speculative Decoding},
  author  = {Gautam, Aayush and Shrestha, Susav and Reddy, Narasimha},
  journal = {arXiv preprint arXiv:2504.00030},
  year    = {2025}
}
""",
    "mamou2024": """\
@article{mamou2024dynamic,
  title   = {Dynamic Speculation Lookahead Accelerates Speculative Decoding of Large Language
             Models},
  author  = {Mamou, Jonathan and Pereg, Oren and Korat, Daniel and Berchansky, Moshe and
             Timor, Nadav and Wasserblat, Moshe and Schwartz, Roy},
  journal = {arXiv preprint arXiv:2405.04304},
  year    = {2024}
}
""",
    "gante2023": """\
@misc{gante2023assisted,
  title  = {Assisted Generation: a new direction toward low-latency text generation},
  author = {Gante, Joao},
  year   = {2023},
  doi    = {10.57967/hf/0638},
  url    = {https://huggingface.co/blog/assisted-generation}
}
""",
    "turbospec2024": """\
@article{liu2024turbospec,
  title   = {{TurboSpec}: Closed-loop Speculation Control System for Optimizing {LLM} Serving
             Goodput},
  author  = {Liu, Xiaoxuan and Park, Jongseok and Hu, Langxiang and Kwon, Woosuk and
             Li, Zhuohan and Zhang, Chen and Du, Kuntai and Mo, Xiangxi and You, Kaichao and
             Cheung, Alvin and Deng, Zhijie and Stoica, Ion and Zhang, Hao},
  journal = {arXiv preprint arXiv:2406.14066},
  year    = {2024}
}
""",
    "dspark2026": """\
@article{cheng2026dspark,
  title   = {{DSpark}: Confidence-Scheduled Speculative Decoding with Semi-Autoregressive
             Generation},
  author  = {Cheng, Xin and Yu, Xingkai and Shao, Chenze and Li, Jiashi and Xiong, Yunfan and
             others},
  journal = {arXiv preprint arXiv:2607.05147},
  year    = {2026}
}
""",
    "banditspec2025": """\
@inproceedings{hou2025banditspec,
  title     = {{BanditSpec}: Adaptive Speculative Decoding via Bandit Algorithms},
  author    = {Hou, Yunlong and Zhang, Fengzhuo and Du, Cunxiao and Zhang, Xuan and
               Pan, Jiachun and Pang, Tianyu and Du, Chao and Tan, Vincent Y. F. and
               Yang, Zhuoran},
  booktitle = {International Conference on Machine Learning},
  year      = {2025},
  note      = {arXiv:2505.15141}
}
""",
    "tapout2025": """\
@article{sridhar2025tapout,
  title   = {{TapOut}: A Bandit-Based Approach to Dynamic Speculative Decoding},
  author  = {Sridhar, Aditya and Sinnadurai, Nish and Lie, Sean and Thangarasa, Vithursan},
  journal = {arXiv preprint arXiv:2511.02017},
  year    = {2025}
}
""",
    "svip2024": """\
@article{zhang2024svip,
  title   = {Draft Model Knows When to Stop: A Self-Verification Length Policy for Speculative
             Decoding},
  author  = {Zhang, Ziyin and Xu, Jiahao and Liang, Tian and Chen, Xingyu and He, Zhiwei and
             Wang, Rui and Tu, Zhaopeng},
  journal = {arXiv preprint arXiv:2411.18462},
  year    = {2024}
}
""",
    "adaedl2024": """\
@article{agrawal2024adaedl,
  title   = {{AdaEDL}: Early Draft Stopping for Speculative Decoding of Large Language Models via
             an Entropy-based Lower Bound on Token Acceptance Probability},
  author  = {Agrawal, Sudhanshu and Jeon, Wonseok and Lee, Mingu},
  journal = {arXiv preprint arXiv:2410.18351},
  year    = {2024}
}
""",
    "zhang2023": """\
@article{zhang2023draft,
  title   = {Draft \\& Verify: Lossless Large Language Model Acceleration via Self-Speculative
             Decoding},
  author  = {Zhang, Jun and Wang, Jue and Li, Huan and Shou, Lidan and Chen, Ke and Chen, Gang and
             Mehrotra, Sharad},
  journal = {arXiv preprint arXiv:2309.08168},
  year    = {2023}
}
""",
    "exllamav3": """\
@misc{exllamav3,
  title  = {{ExLlamaV3}},
  author = {{turboderp}},
  year   = {2026},
  url    = {https://github.com/turboderp-org/exllamav3}
}
""",
    "sglang2026": """\
@misc{sglang2026adaptive,
  title  = {Adaptive Speculative Decoding},
  author = {{SGLang Team}},
  year   = {2026},
  url    = {https://docs.sglang.io/docs/advanced_features/adaptive_speculative_decoding}
}
""",
    "saxena2023": """\
@misc{saxena2023lookup,
  title  = {Prompt Lookup Decoding},
  author = {Saxena, Apoorv},
  year   = {2023},
  url    = {https://github.com/apoorvumang/prompt-lookup-decoding}
}
""",
    "rest2024": """\
@inproceedings{he2024rest,
  title     = {{REST}: Retrieval-Based Speculative Decoding},
  author    = {He, Zhenyu and Zhong, Zexuan and Cai, Tianle and Lee, Jason D. and He, Di},
  booktitle = {Proceedings of the 2024 Conference of the North American Chapter of the Association
               for Computational Linguistics: Human Language Technologies},
  pages     = {1582--1595},
  year      = {2024}
}
""",
    "lookahead2024": """\
@inproceedings{fu2024lookahead,
  title     = {Break the Sequential Dependency of {LLM} Inference Using Lookahead Decoding},
  author    = {Fu, Yichao and Bailis, Peter and Stoica, Ion and Zhang, Hao},
  booktitle = {International Conference on Machine Learning},
  year      = {2024},
  note      = {arXiv:2402.02057}
}
""",
    "specdec2023": """\
@inproceedings{xia2023specdec,
  title     = {Speculative Decoding: Exploiting Speculative Execution for Accelerating Seq2seq
               Generation},
  author    = {Xia, Heming and Ge, Tao and Wang, Peiyi and Chen, Si-Qing and Wei, Furu and
               Sui, Zhifang},
  booktitle = {Findings of the Association for Computational Linguistics: EMNLP},
  year      = {2023},
  note      = {arXiv:2203.16487}
}
""",
    "cmasd2025": """\
@article{sen2025cmasd,
  title   = {Confidence-Modulated Speculative Decoding for Large Language Models},
  author  = {Sen, Jaydip and Dasgupta, Subhasis and Waghela, Hetvi},
  journal = {arXiv preprint arXiv:2508.15371},
  year    = {2025}
}
""",
    "easd2025": """\
@article{su2025easd,
  title  = {Entropy-Aware Speculative Decoding Toward Improved {LLM} Reasoning},
  author = {Su, Tiancheng and Zhang, Meicong and He, Guoxiu},
  year   = {2025}
}
""",
    "ears2025": """\
@article{sun2025ears,
  title   = {{EARS}: Efficient Adaptive Rejection Sampling for Accelerating Speculative Decoding
             in Large Language Models},
  author  = {Sun, Chendong and Mao, Ali and Xu, Lei and Chen, Mingmin},
  journal = {arXiv preprint arXiv:2512.13194},
  year    = {2025}
}
""",
    "daliri2025": """\
@inproceedings{daliri2025coupling,
  title     = {Coupling without Communication and Drafter-Invariant Speculative Decoding},
  author    = {Daliri, Majid and Musco, Christopher and Suresh, Ananda Theertha},
  booktitle = {IEEE International Symposium on Information Theory},
  year      = {2025},
  note      = {arXiv:2408.07978}
}
""",
    "medusa2024": """\
@article{cai2024medusa,
  title   = {Medusa: Simple {LLM} Inference Acceleration Framework with Multiple Decoding Heads},
  author  = {Cai, Tianle and Li, Yuhong and Geng, Zhengyang and Peng, Hongwu and Lee, Jason D. and
             Chen, Deming and Dao, Tri},
  journal = {arXiv preprint arXiv:2401.10774},
  year    = {2024}
}
""",
    "block2024": """\
@article{sun2024block,
  title   = {Block Verification Accelerates Speculative Decoding},
  author  = {Sun, Ziteng and Mendlovic, Uri and Leviathan, Yaniv and Aharoni, Asaf and
             Ro, Jae Hun and Beirami, Ahmad and Suresh, Ananda Theertha},
  journal = {arXiv preprint arXiv:2403.10444},
  year    = {2024}
}
""",
    "diverse2026": """\
@article{wang2026diversed,
  title   = {{DIVERSED}: Relaxed Speculative Decoding via Dynamic Ensemble Verification},
  author  = {Wang, Ziyi and Kasa, Siva Rajesh and {Ankith M S} and Kasa, Santhosh Kumar and
             Zou, Jiaru and Negi, Sumit and Zhang, Ruqi and Jiang, Nan and Song, Qifan},
  journal = {arXiv preprint arXiv:2604.07622},
  year    = {2026}
}
""",
    "fly2025": """\
@article{li2025fly,
  title   = {Training-Free Loosely Speculative Decoding: Accepting Semantically Correct Drafts
             Beyond Exact Match},
  author  = {Li, Jinze and Xu, Yixing and Li, Guanchen and Yang, Shuo and Xu, Jinfeng and
             Yin, Xuanwu and Li, Dong and Ngai, Edith C. H. and Barsoum, Emad},
  journal = {arXiv preprint arXiv:2511.22972},
  year    = {2025}
}
""",
    "specbound2026": """\
@inproceedings{wen2026specbound,
  title     = {{SpecBound}: Adaptive Bounded Self-Speculation with Layer-wise Confidence
               Calibration},
  author    = {Wen, Zhuofan and Feng, Yang},
  booktitle = {Findings of the Association for Computational Linguistics: ACL 2026},
  year      = {2026},
  note      = {arXiv:2604.12247}
}
""",
    "adadecode2025": """\
@inproceedings{wei2025adadecode,
  title     = {{AdaDecode}: Accelerating {LLM} Decoding with Adaptive Layer Parallelism},
  author    = {Wei, Zhepei and Chen, Wei-Lin and Zhu, Xinyu and Meng, Yu},
  booktitle = {Proceedings of the 42nd International Conference on Machine Learning},
  series    = {Proceedings of Machine Learning Research},
  volume    = {267},
  pages     = {65981--65996},
  year      = {2025}
}
""",
    "kangaroo2024": """\
@article{liu2024kangaroo,
  title   = {Kangaroo: Lossless Self-Speculative Decoding via Double Early Exiting},
  author  = {Liu, Fangcheng and Tang, Yehui and Liu, Zhenhua and Ni, Yunsheng and
             Han, Kai and Wang, Yunhe},
  journal = {arXiv preprint arXiv:2404.18911},
  year    = {2024}
}
""",
}


def bibtex(*names: str) -> str:
    """The entries of some names, one after the other.

    >>> print(bibtex("saxena2023"))
    @misc{saxena2023lookup,
    ...
    """
    return "\n".join(BIBTEX[name] for name in names)
