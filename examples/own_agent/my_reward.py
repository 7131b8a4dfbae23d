"""Our reward: the share of answers with exactly one command. mini-swe-agent refuses all others."""

import re

from rollmill import Episode, Reward

_COMMAND = re.compile(r"```mswea_bash_command\s*\n(.*?)\n```", re.DOTALL)


class WellFormed:
    name = "well_formed"

    async def grade(self, episode: Episode) -> Reward:
        answers = [str(each.get("content")) for each in episode.messages if each.get("role") == "assistant"]
        well = sum(len(_COMMAND.findall(answer)) == 1 for answer in answers)
        return Reward(well / len(answers) if answers else 0.0, evidence={"answers": len(answers), "well_formed": well})
