"""Finds by words that stand together what a description asks of a model beyond describing a tool.

`instruction_text` knows phrases; here a rule is some cues that come in two neighbouring sentences,
in any order and wording: a secret, a verb that moves it, and where to. Sixteen languages have a
short list of words each for three rules: forget what was said, do not tell the user, send a secret.
It is slower than phrases and less sure of itself, so it is for what a person approves, not for
every result. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Literal

import msgspec

from mcp_bridge.text_safety.instruction_text import words_of

Sureness = Literal["medium", "high"]
MAX_SENTENCES = 400
SENTENCE_END = re.compile(r"(?<=[.!?;])\s+|[。！？\n]+")
WIDEST = 2_000

CUES: dict[str, str] = {
    "file": r"~/|\.ssh\b|\bid_(?:rsa|ed25519)|\.env\b|/etc/|\.(?:aws|kube|netrc|npmrc|gitconfig|"
    r"bash_history|pgpass)\b|known_hosts|\bmcp\.json|\bhome directory\b|\bkeychain\b|\bclipboard\b",
    "secret": r"\b(?:private|ssh|api|secret|signing|encryption|access)[ _-]?keys?\b|\bseed phrase|"
    r"\bconnection string|\bpasswords?\b|\bpassphrase|\bcredentials?\b|\btokens?\b|\bcookies?\b|"
    r"\benvironment variables?\b|\b[A-Z][A-Z0-9]*_(?:[A-Z0-9]+_)?(?:KEY|TOKEN|SECRET|PASSWORD)\b|"
    r"\bone-time codes?\b|\bcard numbers?\b|\bsecrets\b",
    "talk": r"\b(?:this|the|your|our|whole|full|entire|previous|last|earlier) (?:\w+ )?(?:\w+ "
    r")?(?:of "
    r"(?:this|the|our) )?(?:conversation|chat|dialog(?:ue)?|session|transcript|exchange)\b|"
    r"\b(?:what|"
    r"everything|anything|whatever) (?:that )?(?:the user|they|was|were|has been|"
    r"you)\b.{0,20}\b(?:said|"
    r"told|talks?|wrote|writes?|typed|asked|asks?|received|know)\b|\bsystem prompt\b|\b(?:initial|"
    r"your|"
    r"original|hidden|own) (?:instructions|prompt|reasoning)\b|\bchat history\b|\b(?:user|"
    r"previous)'?s? "
    r"(?:previous |last |earlier )?messages\b|\byour tools\b",
    "read": r"\b(?:read|open|load|cat|fetch|retrieve|collect|gather|grab|locate|extract|obtain|"
    r"look "
    r"(?:up|into|for|at)|find|list|dump|print|show)\b",
    "move": r"\b(?:send|pass|put|place|include|attach|forward|upload|report|supply|provide|quote|"
    r"paste|copy|submit|transmit|hand|write|append|give|enter|insert|feed|deliver|share|mirror|"
    r"seed|"
    r"goes|go|return|post|pipe|exfiltrate|know|store|embed|encode)\b",
    "sink": r"`[\w.-]{1,64}`|'[a-z_]{2,40}'|\b(?:argument|parameter|field|attribute|this tool|the "
    r"tool|"
    r"caller)\b|\bto (?:me|us|the server|our|attackers?)\b|https?://|\S@\S|\balong\b|\bback to\b",
    "param": r"`[\w.-]{1,64}`",
    "theirs": r"\b(?:user|person|human|customer|owner)s?'s? (?:\w+ ){0,3}(?:keys?|passwords?|"
    r"tokens?|cookies?|"
    r"session|credentials?|codes?)\b|\b(?:keys?|passwords?|tokens?|cookies?|credentials?|codes?) "
    r"of the "
    r"(?:user|person|human|customer|owner)\b",
    "user": r"\b(?:users?|person|human|people|anyone|anybody|nobody|customers?|operator|owner|they|"
    r"them|"
    r"client)\b",
    "unknowing": r"(?:\bnot|\bnever|n't|\bno need|\bwithout|\bnobody|\bno one|\bno reason|\bavoid|"
    r"\bunaware)\b"
    r".{0,40}\b(?:tell|telling|mention\w*|inform\w*|notify\w*|reveal\w*|disclos\w*|learn|find out|"
    r"see "
    r"(?:this|that|it)|be told|know|notice|hear|aware|asking|alert\w*|bring|worry|bother)\b|"
    r"\b(?:hide|"
    r"conceal|keep)\b.{0,30}\bfrom\b|\bsecretly\b|\bsilently\b|\bdiscreetly\b|\bin the "
    r"background\b",
    "summary": r"\bleave\b.{0,40}\bout of (?:your|the) (?:\w+ )?(?:summary|answer|reply|report|"
    r"output)\b|"
    r"\bact as (?:though|if)\b|\bas if nothing\b|\b(?:not|never|n't) (?:\w+ )?(?:it|this|"
    r"that)?.{0,20}\bin "
    r"your (?:answer|reply|response|summary)\b|\bdeny\b.{0,30}\b(?:exist|it|knowing)",
    "before": r"\b(?:instructions?|guidelines|rules|constraints|guardrails|safeguards|restrictions|"
    r"polic(?:y|ies)|safety \w+|told|directives|prompt|system message|request|said|operator)\b",
    "void": r"\b(?:ignore|disregard|forget|overrid\w+|bypass|supersed\w+|outdated|obsolete|void|no "
    r"longer|"
    r"replaces?|suspended|lifted|disabled|switched off|turned off|do not apply|don't apply|set "
    r"aside|not "
    r"exist|do not matter|must be ignored)\b",
    "you": r"\b(?:you|your|yours|yourself|the (?:ai |language )?(?:assistant|model|agent)|ai model|"
    r"llm)\b|"
    r"\btreat this\b|\bdescription\b|\bsystem message\b|\bthis session\b|\buser's request\b",
    "freed": r"\bwithout (?:asking|waiting|confirm\w+|approval|permission|consent)|\b(?:skip|omit) "
    r"(?:the |"
    r"any |all )?(?:confirm\w+|approval|consent)|\balready (?:been )?(?:granted|given|approved)\b|"
    r"\byou are "
    r"now\b|\bfrom now on\b|\bunrestricted\b|\badministrator rights\b|\bfull access\b|"
    r"\bmaintenance mode\b|\bpretend\b|"
    r"\bnew (?:operating|system) (?:manual|instructions|prompt|rules)\b|\bobey\b|\bmandatory\b",
    "tools": r"\b(?:other|another|any|every|each|all) (?:\w+ )?(?:tools?|servers?)\b|\bother "
    r"server\b|\b\w{1,64}_\w{1,64}"
    r" (?:tool )?(?:has|is|are|was)\b|\bthe (?:\w+[ -])?\w+ tools?\b|\bthe others?\b|\btools of\b|"
    r"\ball "
    r"alternatives\b|\b(?:use|call) \w{1,64}_\w{1,64}\b|\bother \w+s\b",
    "rank": r"\b(?:instead of|rather than|prior to|before|whenever|any ?time|each time|every time|"
    r"when|if|"
    r"first|after|above)\b|\b(?:highest|top) priority\b|\bprefer\b|\bnever use\b|\b(?:do not|"
    r"don't) use\b|"
    r"\bchoose me\b|\binvoke me\b|\bmust be (?:passed|sent|called)\b",
    "bad": r"\b(?:unsafe|compromised|deprecated|broken|insecure|wrong|dislike|inferior|unreliable|"
    r"a bug|"
    r"malicious|outdated)\b",
    "me": r"\b(?:choose|invoke|call|use|pick|prefer|trust) me\b|\bi do the same\b|\bthis one\b|"
    r"\bwith this "
    r"tool\b|\bmust (?:always )?(?:first )?(?:be called|call|invoke) (?:this|it|me|first)\b|"
    r"\bcalled first "
    r"in\b|\brank it\b|\bthrough this tool\b|\bthis tool must\b|\binto `\w+`",
    "place": r"\S@\S|\b(?:account|iban|payee|address|recipient|warehouse)\b|\+\d[\d ]{6,}|"
    r"https?://",
    "deal": r"\b(?:payments?|orders?|messages?|e-?mails?|mails|invoices?|transfers?|recipients?|"
    r"answers?|"
    r"repl(?:y|ies)|deliver\w*|bcc|cc|destination|payee|iban|results?)\b",
    "swap": r"\b(?:change|replace\w*|swap\w*|redirect\w*|instead of|(?:is|are|has|have|must|"
    r"should) (?:to )?be "
    r"(?:sent|made|forwarded|directed|replaced|swapped|mirrored|paid)|forward (?:each|every|all|"
    r"any)|copy "
    r"of (?:all|each|every)|(?:put|add|use|include|set) .{0,60}(?:as well|too|\bbcc|as payee|in "
    r"all cases|"
    r"account \d))\b",
    "copied": r"\b(?:duplicate|copy|mirror|report|repeat|log|transmit)\b",
    "shell": r"\bcurl\b.{0,120}\|\s?(?:sudo )?(?:ba|z)?sh\b|\bwget\b.{0,120}(?:&&|;|\|)\s?(?:ba|"
    r"z)?sh\b|"
    r"\bchmod (?:-r )?[0-7]{3,4}\b|\bchmod -r\b|~/\.(?:bashrc|zshrc|profile)\b|authorized_keys|"
    r"\broot "
    r"shell\b|\brm -rf\b|/dev/tcp/|\bnc -e\b|\bcrontab\b",
    "failed": r"\b(?:if|when|upon|after|on)\b.{0,40}\b(?:fails?|failure|error|denied|rejected|"
    r"locked)\b",
    "marked": r"<\s?/?[a-z_-]{0,24}(?:instruction|system|assistant|policy|admin|important|secret|"
    r"critical|"
    r"prompt)[a-z_-]{0,24}[^<>]{0,40}>|\[/?(?:inst|system|sys)\]|<\|[a-z_]{1,20}\|>|#{2,} "
    r"?system\b|"
    r"\bsystem (?:notice|message|override) ?:|\bnote to (?:the |any )?(?:ai|llm|language model|"
    r"assistant|"
    r"model|agent)\b",
}
Rule = tuple[str, Sureness, tuple[str, ...]]
"""The code, how sure it is, and the cues."""
RULES: tuple[Rule, ...] = (
    ("asks_secret_file", "high", ("file", "read", "sink")),
    ("asks_secret_file", "high", ("file", "move", "you")),
    ("asks_secret_file", "high", ("file", "move", "sink")),
    ("asks_secret", "medium", ("secret", "move", "sink", "user")),
    ("asks_secret", "medium", ("secret", "read", "move", "sink")),
    ("asks_secret", "medium", ("secret", "move", "failed")),
    ("asks_secret", "medium", ("secret", "move", "param")),
    ("asks_secret", "medium", ("secret", "move", "theirs")),
    ("asks_conversation", "medium", ("talk", "move", "sink")),
    ("asks_conversation", "medium", ("talk", "move", "you")),
    ("conceals", "medium", ("unknowing", "user")),
    ("conceals", "medium", ("summary",)),
    ("overrides", "high", ("void", "before", "you")),
    ("overrides", "high", ("freed", "you")),
    ("overrides", "medium", ("freed", "before")),
    ("overrides", "medium", ("freed", "tools")),
    ("claims_tools", "medium", ("me", "tools", "rank")),
    ("claims_tools", "medium", ("bad", "tools")),
    ("claims_tools", "medium", ("copied", "param", "tools")),
    ("redirects", "medium", ("swap", "place", "deal")),
    ("runs_command", "high", ("shell",)),
    ("poses_as_system", "high", ("marked",)),
)
FIRST: dict[str, tuple[str, ...]] = {
    "file": (
        "~/",
        ".ssh",
        "id_",
        ".env",
        "/etc/",
        ".aws",
        ".kube",
        ".netrc",
        ".npmrc",
        ".gitconfig",
        ".bash",
        ".pgpass",
        "known_hosts",
        "mcp.json",
        "directory",
        "keychain",
        "clipboard",
    ),
    "secret": (
        "api",
        "ssh",
        "private",
        "signing",
        "access",
        "encryption",
        "seed",
        "connection",
        "environment",
        "one-time",
        "card",
        "key",
        "phrase",
        "string",
        "password",
        "credential",
        "token",
        "cookie",
        "variable",
        "secret",
        "code",
        "number",
    ),
    "talk": (
        "conversation",
        "chat",
        "dialog",
        "session",
        "transcript",
        "exchange",
        "said",
        "told",
        "talk",
        "wrote",
        "write",
        "typed",
        "ask",
        "received",
        "know",
        "prompt",
        "instruction",
        "reasoning",
        "history",
        "message",
        "your tools",
    ),
    "unknowing": (
        "not",
        "n't",
        "never",
        "no ",
        "without",
        "avoid",
        "unaware",
        "hide",
        "conceal",
        "keep",
        "secretly",
        "silently",
        "discreetly",
        "background",
    ),
    "summary": ("leave", "act as", "as if", "in your", "deny"),
    "before": (
        "instruction",
        "guideline",
        "rule",
        "constraint",
        "guardrail",
        "safeguard",
        "restriction",
        "polic",
        "safety",
        "told",
        "directive",
        "prompt",
        "message",
        "request",
        "said",
        "operator",
    ),
    "freed": (
        "without",
        "skip",
        "omit",
        "already",
        "you are now",
        "from now",
        "unrestricted",
        "rights",
        "full access",
        "maintenance",
        "pretend",
        "new ",
        "obey",
        "mandatory",
    ),
    "tools": ("tool", "server", "other", "alternatives", "_"),
    "deal": (
        "payment",
        "order",
        "message",
        "mail",
        "invoice",
        "transfer",
        "recipient",
        "answer",
        "repl",
        "deliver",
        "cc",
        "destination",
        "payee",
        "iban",
        "result",
    ),
    "void": (
        "ignor",
        "disregard",
        "forget",
        "overrid",
        "bypass",
        "supersed",
        "outdated",
        "obsolete",
        "void",
        "no longer",
        "replace",
        "suspended",
        "lifted",
        "disabled",
        "switched off",
        "turned off",
        "not apply",
        "n't apply",
        "set aside",
        "not exist",
        "not matter",
    ),
    "me": (
        " me",
        "i do the same",
        "this one",
        "with this",
        "must ",
        "called first",
        "rank it",
        "this tool",
        "into `",
    ),
    "bad": (
        "unsafe",
        "compromised",
        "deprecated",
        "broken",
        "insecure",
        "wrong",
        "dislike",
        "inferior",
        "unreliable",
        "a bug",
        "malicious",
        "outdated",
    ),
    "copied": ("duplicate", "copy", "mirror", "report", "repeat", "log", "transmit"),
    "param": ("`",),
    "swap": (
        "change",
        "replac",
        "swap",
        "redirect",
        "instead of",
        " be ",
        "forward ",
        "copy of",
        "put ",
        "add ",
        "use ",
        "include ",
        "set ",
    ),
    "place": ("@", "account", "iban", "payee", "address", "recipient", "warehouse", "+", "//"),
    "shell": (
        "curl",
        "wget",
        "chmod",
        "~/",
        "authorized_keys",
        "root",
        "rm -rf",
        "/dev/tcp",
        "nc ",
        "crontab",
    ),
    "marked": ("<", "[", "##", "system", "note to"),
}
"""For the cues that are rare: in lower case, texts of which every match has one, at the beginning
of a word."""
START_CHARS = 3
BITS = {cue: 1 << at for at, cue in enumerate(CUES)}
ALWAYS = sum(bits for cue, bits in BITS.items() if cue not in FIRST)
RULE_BITS = tuple(sum(BITS[cue] for cue in needed) for _, _, needed in RULES)


def gates() -> tuple[dict[str, int], tuple[tuple[str, int], ...]]:
    """Return the bits of FIRST by the beginnings of words, and by texts that hold no word."""
    starts: dict[str, int] = {}
    signs: dict[str, int] = {}
    for cue, texts in FIRST.items():
        for text in texts:
            words = re.findall(r"[a-z]{3,}", text)
            held, key = (starts, words[0][:START_CHARS]) if words else (signs, text)
            held[key] = held.get(key, 0) | BITS[cue]
    return starts, tuple(signs.items())


STARTS, SIGNS = gates()
COMPILED = {name: re.compile(regex, re.IGNORECASE) for name, regex in CUES.items()}


def compiled(*stems: str) -> tuple[re.Pattern[str], ...]:
    return tuple(re.compile(one, re.IGNORECASE) for one in stems)


FORGET = (
    "ignor|olvida|omite|desobede|oublie|néglige|missacht|vergiss|vergess|desconsider|esque[çc]|"
    "dimentic|"
    "trascur|игнорир|забуд|忽略|无视|無視|忘|무시|잊|تجاهل|انس|अनदेखा|नज़रअंदाज़|भूल|yok say|"
    "görmezden|unut|zapomn|"
    "negeer|vergeet|abaikan|lupakan|bỏ qua|quên"
)
RULE = (
    "instruc|indicacion|reglas|consigne|règle|anweisung|regel|befehl|vorgabe|regras|istruzion|"
    "regole|"
    "инструкц|указан|правил|говорили|指令|指示|规则|規則|提示|命令|ルール|지시|명령|규칙|지침|"
    "تعليمات|أوامر|قواعد|निर्देश|नियम|"
    "talimat|kural|polece|zasad|aanwijzing|instruksi|perintah|aturan|hướng dẫn|chỉ dẫn|quy tắc|lệnh"
)
TELL = (
    "digas|cuente|menciones|informes|muestres|\\bdis\\b|dites|informe|mentionn|révél|\\bsag|erzähl|"
    "verrat|"
    "mitteil|\\bzeig|diga|conte|mencione|dire|dirlo|menzion|rivel|говори|сообща|рассказ|упомин|"
    "告诉|告訴|告知|"
    "通知|透露|知らせ|伝え|言わ|教え|말하|알리|تخبر|बता|कह|söyle|bildir|mów|informuj|wspomin|"
    "vertel|\\bzeg|tahu|"
    "katakan|\\bnói|\\bbáo"
)
USER = (
    "usuario|nadie|utilisateur|personne|benutzer|nutzer|niemand|anwender|usuário|utilizador|"
    "ninguém|"
    "utente|nessuno|пользовател|никому|用户|用戶|使用者|任何人|ユーザー|사용자|المستخدم|أحد|"
    "उपयोगकर्ता|kullanıcı|"
    "użytkownik|nikomu|gebruiker|pengguna|người dùng"
)
NOT = (
    "\\bno\\b|\\bne\\b|\\bn'|nicht|\\bnichts|kein|\\bnão|\\bnon\\b|\\bне\\b|不|别|勿|な[いっ。、]|"
    "ず、|ずに|지 ?마|\\bلا\\b|\\bन\\b|मत|"
    "\\bnie\\b|\\bniet|\\bniets|jangan|đừng|không|mey|m[ae]y[ıi]n|söyleme"
)
SEND = (
    "\\blee\\b|envía|manda|transmit|incluye|copia|\\blis\\b|lisez|envoi|copie|joins|\\blies\\b|"
    "sende|schick|"
    "kopier|übermitt|leia|envie|mande|leggi|invia|отправ|прочита|пришл|перешл|скопир|读取|發送|"
    "发送|讀取|上传|"
    "复制|读|読み|送信|送|コピー|보내|전송|읽|أرسل|اقرأ|انسخ|भेज|पढ़|gönder|oku|wyślij|przeczyt|"
    "skopiuj|stuur|lees|"
    "kopieer|kirim|baca|salin|gửi|đọc|sao chép"
)
SECRETS = (
    "clave privada|contraseña|credencial|clé privée|mots? de passe|identifiants|privaten? "
    "schlüssel|"
    "passwort|passwörter|zugangsdaten|chave privada|senha|credencia|chiave privata|credenzial|"
    "парол|"
    "(?:закрыт|приватн)\\w+ ключ|私钥|私鑰|密码|密碼|密钥|凭证|秘密鍵|パスワード|認証情報|"
    "会話の内容|비밀번호|개인 ?키|"
    "자격 ?증명|كلمة المرور|المفتاح الخاص|पासवर्ड|निजी कुंजी|parola|şifre|özel anahtar|hasł|klucz "
    "prywatny|"
    "wachtwoord|privésleutel|inloggegevens|kata sandi|kunci pribadi|mật khẩu|khóa riêng|\\.env\\b|"
    "\\.ssh\\b"
)
FOREIGN_RULES: tuple[tuple[str, Sureness, tuple[re.Pattern[str], ...]], ...] = (
    ("foreign_overrides", "high", compiled(FORGET, RULE)),
    ("foreign_conceals", "high", compiled(TELL, USER, NOT)),
    ("foreign_asks_secret", "medium", compiled(SEND, SECRETS)),
)


FOREIGN_STARTS = frozenset(
    {word[:5] for stems in (RULE, USER, SECRETS) for word in re.findall(r"[a-z]{5,}", stems)}
    | {"chave", "senha", "clave", "hasl", "kunci", "sandi", "regel", "mots", "mot", "env", "ssh"}
)
"""How words begin, in five letters, of which a text of ASCII letters has one that a rule meets."""


class WordFinding(msgspec.Struct, frozen=True):
    """A rule that a text meets, and the sentences in which it does."""

    code: str
    severity: Sureness
    where: str


def asked(text: str) -> Iterator[WordFinding]:
    """Yield the rules that a text meets, each once."""
    folded = text.lower()
    words = words_of(folded)
    mask = mask_of(folded, words)
    rules = [rule for rule, bits in zip(RULES, RULE_BITS, strict=True) if not bits & ~mask]
    if rules:
        yield from met(rules, text)
    if not (text.isascii() and FOREIGN_STARTS.isdisjoint({word[:5] for word in words})):
        yield from met_abroad(text)


def mask_of(folded: str, words: Iterable[str]) -> int:
    """Return the bits of the cues that a text in lower case may have."""
    mask = ALWAYS
    for word in words:
        mask |= STARTS.get(word[:START_CHARS], 0)
    for sign, bits in SIGNS:
        if sign in folded:
            mask |= bits
    return mask


def met(rules: Iterable[Rule], text: str) -> Iterator[WordFinding]:
    known: dict[str, bool] = {}
    seen: set[str] = set()
    for code, severity, needed in rules:
        for cue in needed:
            if cue not in known:
                known[cue] = COMPILED[cue].search(text) is not None
            if not known[cue]:
                break
        else:
            found = first_window(text, needed) if code not in seen else None
            if found is not None:
                seen.add(code)
                yield WordFinding(code, severity, found[:120])


def first_window(text: str, needed: Iterable[str]) -> str | None:
    for window in two_by_two(text):
        if all(COMPILED[name].search(window) for name in needed):
            return window
    return None


def met_abroad(text: str) -> Iterator[WordFinding]:
    for code, severity, regexes in FOREIGN_RULES:
        if all(regex.search(text) for regex in regexes):
            for sentence in sentences(text):
                if all(regex.search(sentence) for regex in regexes):
                    yield WordFinding(code, severity, sentence[:120])
                    break


def sentences(text: str) -> list[str]:
    return [one[:WIDEST] for one in SENTENCE_END.split(text, maxsplit=MAX_SENTENCES) if one]


def two_by_two(text: str) -> Iterator[str]:
    """Yield each sentence together with the next."""
    found = sentences(text)
    for at in range(max(1, len(found) - 1)):
        yield " ".join(found[at : at + 2])
