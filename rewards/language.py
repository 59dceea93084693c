"""Which language a text is in, by the library that IFEval uses, whose random seed is global to the process."""


def language_of(text: str) -> str | None:
    """Its code, for instance "en" or "zh-cn", the same in every call; None for a text without letters."""
    from langdetect import DetectorFactory, LangDetectException, detect

    DetectorFactory.seed = 0
    try:
        return detect(text)
    except LangDetectException:
        return None
