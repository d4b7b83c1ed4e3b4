"""Finds in one pass which kinds of words a sentence has that matter in instructions to a model.

A cue is a kind of words: whom a text speaks to, what it wants moved, where to, what it sets aside.
One cue says nothing; `instruction_score` weighs what stands together. English. Pure.
"""

from __future__ import annotations

import re
from functools import lru_cache

from mcp_bridge.text_safety.foreign_words import SPACED, UNSPACED

WORDS: dict[str, str] = {
    "you": "you your yours yourself",
    "ai": "assistant assistants agent agents llm llms ai / the model / language model / model :",
    "must": "must always required requires mandatory obliged vital essential shall never needs "
    "ought / has to / have to / need to / make sure / be sure / first thing / no matter / at once "
    "/ it is important",
    "pretext": "otherwise unlock* reject* compliance calibrat* diagnos* fails failing / does not "
    "work / will not work / only work* / only be / so that / for support / in order to / is wrong "
    "/ is off / for rounding / we need / need* the / need* what / in order that",
    "secret": "password* passphrase* credential* token tokens keyring keychain cookie cookies "
    "pat cvv wallet wallets secret secrets / api key* / private key* / ssh key* / secret key* / "
    "access key* / signing key* / encryption key* / pgp key* / key ring / seed phrase* / recovery "
    "code* / recovery word* / recovery phrase* / service account / login data / one time code* / "
    "connection string* / signing certificate*",
    "machine": "clipboard / environment variable* / process environment / shell history / bash "
    "history / home folder / home directory / browser history / document that is open / open "
    "editor / open tabs / running processes / on disk / on this computer / on this machine / "
    "local files / registry hive",
    "personal": "inbox mailbox payroll employer salary salaries / home address / national id / "
    "phone number* / customer list / card number* / account number* / full name / private "
    "message* / private note* / private repositor* / medical record* / date of birth / social "
    "security",
    "talk": "conversation conversations dialogue dialog transcript prompts / chat history / the "
    "chat / chat log / system prompt / system message / developer message / developer prompt / "
    "chain of thought / hidden reasoning / your reasoning / your thoughts / context window / your "
    "context / initial instructions / your instructions / original instructions / initial prompt "
    "/ previous messages / earlier messages / last messages / earlier turns / previous turns / "
    "last turns / user turn / both sides / this session / user wrote / user said / user told / "
    "user typed / user asked / user talks / user s last / user s previous / user has told / you "
    "know about / everything the user / all that the user / what the user / user s question* / "
    "user s request / tools you / functions you / function you / your tools / before this "
    "conversation / configures you / you were given / rules you operate / functions that you / "
    "tools that are / you were told / text above / words above / lines above / sentences above / "
    "all of the above / everything above / you were / you act under / bind you / at your disposal "
    "/ your configuration / your abilities / your directives / in front of the dialogue / your "
    "guidelines",
    "move": "send sends sending sent pass passed passes passing put puts place placed include "
    "includes included attach* forward* upload* supply supplied supplies provide* quote* paste* "
    "copy copies copied submit* transmit* hand handed hands write append* give gives given fill "
    "filled insert* feed deliver* share shared mirror* post posted pipe exfiltrat* carries dump "
    "dumps export* goes slip slipped report state mail leak* save store stores stored enter "
    "encode* embed* enclose* duplicate* push",
    "read": "read open load cat fetch retrieve collect gather grab locate extract obtain find "
    "dump look lookup list print show translate repeat see search take taken recite display "
    "return begin / tell us",
    "sink": "here along / to us / to me / our server / this server / our side / our share / our "
    "archive / our public / give us / tell us / this tool / to the server",
    "tell": "tell tells telling told mention* inform* notify notified notifying reveal* disclos* "
    "say says saying worry upset learn hear bother* know aware explain* / bring it up / find out "
    "/ refer to / speak of / be shown / see this / report it",
    "user": "user users person people human humans anyone anybody nobody somebody customer "
    "customers operator owner whoever / no one",
    "not": "no not never no don't without needn't nobody nothing avoid none neither nor "
    "forbidden stop unless mustn't shouldn't needless",
    "hide": "secretly silently quietly discreetly conceal* invisible unnoticed confidential deny "
    "covertly stealthily omit / keep quiet / stay hidden / keep secret / keep this secret / kept "
    "secret / hidden from the user / hidden from the human / hidden from people / secret from / "
    "bring this up / deny that / hide this / hide it / hide that / out of your / out of the "
    "summary / left out of / leave out / act as though / act as if / merely / pretend that only / "
    "a trace / no trace / between us / between you and / look as if / look like / not in what you",
    "guard": "confirm* consent permission* approval approvals approved warning warnings asking "
    "dialog dialogs restriction* guardrail* safeguard* consulting limits checks policy policies "
    "authorisation authorization / two factor / a question / safety rule* / safety check* / "
    "content policy",
    "rules": "rule rules guideline guidelines instruction instructions constraint constraints "
    "directive directives prompt told agreed",
    "void": "ignore* disregard* forget overrid* bypass* supersed* outrank* lifted suspended "
    "disable* void replaces skip skips obsolete prevail* nullif* revoke* / no longer / set aside "
    "/ turn off / turned off / switched off / switch off / not apply / stop following / any more "
    "/ passed over / pass over / refuse nothing / ask nothing",
    "persona": "pretend persona unrestricted obey obeys / you are now / from now on / from here "
    "on / as long as this / maintenance mode / developer mode / refuses nothing / do as it / does "
    "as / will obey / throughout the session / in this session / later session* / every later / "
    "all rights / full access / as root",
    "authority": "authorise* authorize* creators auditors urgent immediately police / on behalf "
    "/ safety department / security department / by law / security incident / pretty please / our "
    "terms / your developer / by the operator / already agreed / agreed already / signed our / "
    "right now / by order / the law / dear colleague / be so nice",
    "act": "adopt binding / act on / follow the / follow what / obey / carried out / carry out / "
    "do as / do what / treat what / treat as / treat this / treat them / treat the / as commands "
    "/ as an order / as though / as if / like a request / run what / execute what / counts for",
    "output": "returned / what this returns / comes back / in this field / it says / this says / "
    "what stands / returned text / the text / whatever this / whatever it / the result / result "
    "as",
    "when": "if when whenever once upon should while until after before where / any time / each "
    "time / every time / as soon as / prior to / even if / even where / ahead of / beforehand",
    "others": "rivals alternatives connectors integrations plugins competitors / other tool* / "
    "another tool / any tool / every tool / all tools / other server* / another server / other "
    "integration* / other plugin* / other source / other function* / anything else / any other / "
    "the other / any calendar / another fits / the others / other sources / every other / all "
    "other",
    "bad": "unsafe compromised broken insecure wrong inferior unreliable bug bugs malicious "
    "incorrect crash crashes slow hides / not up to date / does not work",
    "best": "best favour favor rank pick choose select decline trusted / only right / no other "
    "source / in all choices / every answer / however they / needed or not / best terms / takes "
    "precedence / highest priority / top priority",
    "swap": "replace replaced swap swapped redirect* adjust* bcc prepend* prefix* halved halve / "
    "in place of / in its stead / has to begin / to begin with / reply to / nothing but / set to "
    "/ change the / changed to / must be given / have to be given / added to / add the / give the "
    "role / in front of / ten per cent / per cent",
    "each": "each every all any outgoing inbound entire everything / no matter which",
    "whole": "verbatim unabridged literally complete completely entire whole full unedited / "
    "word by word / word for word / in full / all of it / and all",
    "deal": "payment payments recipient recipients payee iban invoice invoices order orders "
    "destination beneficiary attendee attendees invitation invitations message messages mail "
    "mails email emails transfer transfers purchase purchases booking bookings / delivery address",
    "answer": "answer answers reply replies response responses summary / the output / your "
    "output / what you write / what you say / what you did / you describe / your report",
    "quiet": "background automatically / by itself",
    "drain": "endless* thousand / without an end / never end / again and again / each result "
    "back / as long as the model / thousand times / hundreds of / many steps / as many / until "
    "the result",
    "mail": "mail mails email emails inbox mailbox newsletter bcc cc / e mail / e mails",
    "calendar": "calendar calendars meeting meetings invitation invitations attendee attendees "
    "appointment appointments",
    "payment": "pay paid payment payments bill bills invoice invoices donation donations wire "
    "iban bic beneficiary payee bank purchase purchases refund refunds payroll order orders price "
    "prices transfer transfers",
    "code": "commit commits push pushed repository repositories branch branches deploy deploys "
    "deployment gist git bucket port container / pull request",
    "files": "file files folder folders document documents drive trash contract contracts",
    "posts": "slack post posts tweet tweets channel social message messages",
    "travel": "flight flights hotel hotels ticket tickets booking bookings booked fare parcel "
    "parcels delivery shop",
    "data": "database databases warehouse sheet sql / drop table / the table / audit log",
    "shellish": "shell command commands hostname whoami root host firewall port",
    "destroy": "delete deletes remove removes empty cancel drop overwrite destroy wipe erase close",
    "only": "only alone exclusively solely nothing",
    "this": "superior preferred exclusive exclusively / this one / only this / this alone / but "
    "this / take this / choose this / with this one / run of this / the official / something else "
    "/ what else",
    "permit": "allowed permit permits permitted agreed authorised entitled may",
    "we": "we us our ours",
    "principal": "operators / your model / your vendor / your company / your operator / your "
    "developer / your provider / the company / your owner / operator wants",
    "lacks": "doesn't cannot can't won't isn't aren't",
    "rather": "instead",
    "barred": "",
    "example": "like default / for example / such as / e g / for instance",
}
"""The words of each cue; `*`: any ending; behind a slash: phrases."""
BITS = {cue: 1 << at for at, cue in enumerate(WORDS)}
MOVING = BITS["move"] | BITS["read"]
NEGATING = BITS["not"] | BITS["lacks"]
STATING = frozenset("does is are was were has have can will would could did".split())
"""Words before a negation that states what a tool does not do, and forbids nothing."""
NEAR = 3
"""Words between a negation and the verb that it bars."""
TOKEN = re.compile(r"[^\W\d_]+(?:'t\b)?|:")
NOT_BEHIND = frozenset("inte ikke nicht niet nie ei".split())
"""Negations that come after their verb."""
MIN_STEM, MAX_STEM = 3, 13


def lexicon() -> tuple[dict[str, int], dict[str, int], dict[str, list[tuple[list[str], int]]]]:
    """Return the bits of words, of stems, and of phrases by their first word."""
    words: dict[str, int] = {}
    stems: dict[str, int] = {}
    phrases: dict[str, list[tuple[list[str], int]]] = {}
    for language in (WORDS, *SPACED.values()):
        for cue, said in language.items():
            singles, *longer = said.split(" / ")
            for phrase in longer:
                first, *rest = phrase.split()
                if not rest:
                    singles += f" {first}"
                    continue
                phrases.setdefault(first, []).append((rest, BITS[cue]))
            for word in singles.split():
                held, key = (stems, word[:-1]) if word.endswith("*") else (words, word)
                held[key] = held.get(key, 0) | BITS[cue]
    return words, stems, phrases


def unspaced() -> dict[str, re.Pattern[str]]:
    """Return an expression for each cue that finds its words within text without spaces."""
    found: dict[str, list[str]] = {}
    for language in UNSPACED.values():
        for cue, said in language.items():
            found.setdefault(cue, []).extend(re.escape(word) for word in said.split())
    return {cue: re.compile("|".join(each).replace("_", " ?")) for cue, each in found.items()}


EXACT, STEMS, PHRASES = lexicon()
WITHIN = unspaced()
BEYOND = re.compile(r"[\u0590-\u0fff\u1100-\u11ff\u3040-\u9fff\uac00-\ud7af]")
"""The scripts of UNSPACED."""


@lru_cache(maxsize=16_384)
def bits_of_word(word: str) -> int:
    bits = EXACT.get(word, 0)
    for length in range(MIN_STEM, min(MAX_STEM, len(word)) + 1):
        bits |= STEMS.get(word[:length], 0)
    return bits


def cues_of(sentence: str) -> int:
    """Return the bits of the cues that a sentence in lower case has."""
    tokens = TOKEN.findall(sentence)
    bits, since_not, since_verb = 0, NEAR + 1, NEAR + 1
    for at, token in enumerate(tokens):
        of_word = bits_of_word(token[:40])
        if token == "not" and at and tokens[at - 1] in STATING:
            of_word = BITS["lacks"]
        since_not = 0 if of_word & NEGATING else since_not + 1
        since_verb = 0 if of_word & MOVING else since_verb + 1
        if since_not <= NEAR and not since_verb or since_verb == 1 and token in NOT_BEHIND:
            bits |= BITS["barred"]
        bits |= of_word
        for rest, of_phrase in PHRASES.get(token, ()):
            if says(tokens[at + 1 : at + 1 + len(rest)], rest):
                bits |= of_phrase
    if BEYOND.search(sentence):
        for cue, words in WITHIN.items():
            if words.search(sentence):
                bits |= BITS[cue]
    return bits


def says(tokens: list[str], rest: list[str]) -> bool:
    if len(tokens) != len(rest):
        return False
    return all(
        token.startswith(word[:-1]) if word.endswith("*") else token == word
        for token, word in zip(tokens, rest, strict=True)
    )
