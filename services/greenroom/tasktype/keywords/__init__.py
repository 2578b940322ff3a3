"""Keywords by task type, the most matches win: eMoE, section 3.2.1."""

from greenroom.tasktype.keywords.extractor import KeywordExtractor
from greenroom.tasktype.keywords.profile import Profile, load_profile, parse_profile

__all__ = ["KeywordExtractor", "Profile", "load_profile", "parse_profile"]
