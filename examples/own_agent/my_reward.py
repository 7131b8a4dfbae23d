"""Our reward: the share of answers with exactly one command. mini-swe-agent refuses all others."""

import re

from rollmill import Episode, Grade, Reward

_COMMAND = re.compile(r"```mswea_bash_command\s*\n(.*?)\n```", re.DOTALL)


class WellFormed(Reward):
    name = "well_formed"

    async def grade(self, episode: Episode) -> Grade:
        answers = [str(each.get("content")) for each in episode.messages if each.get("role") == "assistant"]
        well = sum(len(_COMMAND.findall(answer)) == 1 for answer in answers)
        return Grade(well / len(answers) if answers else 0.0, evidence={"answers": len(answers), "well_formed": well})
