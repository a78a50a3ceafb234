"""Grammars in GBNF, and texts that they describe."""
from __future__ import annotations

LLAMA_JSON = r'''# as llama.cpp ships it
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}'''
DESCRIBED = {
    "as it comes": (LLAMA_JSON, ['{"a": [1, true], "é": "x"}', "{}"], ["[1]", '{"a": }']),
    "rules within rules": ('root ::= "a" x "b"\nx ::= "c" x | ""', ["ab", "accb"], ["a", "acc"]),
    "names with hyphens and capitals": (
        'root ::= my-rule\nmy-rule ::= "a" my-rule | theEnd\ntheEnd ::= "b" my-rule | "c"',
        ["abac"],
        ["ab"],
    ),
    "letters by number": ('root ::= "\\u00e9\\x41" [\\u4e00-\\u9fff]+', ["éA日本"], ["eA日", "éA"]),
    "any character is a line break too": ('root ::= "<" .{2,3} ">"', ["<a\n>", "<abc>"], ["<a>"]),
    "dots and hashes that are letters": (
        'root ::= "a.b#" x # a . in a remark\nx ::= "+" x | [.#]',
        ["a.b#+.", "a.b##"],
        ["axb#.", "a.b#"],
    ),
    "brackets and escapes": ('root ::= "\\\\[\\]\\n" x\nx ::= "+" x | [\\x5d\\]a]', ["\\[]\n+]"], ["\\[]\nb"]),
    "nothing special in a class": (
        'root ::= [&&] [a~~b] [+--] x\nx ::= "!" | "?" x',
        ["&~,!", "&b-?!"],
        ["&c,!", "&a.!"],
    ),
    "repeats": ('root ::= [0-9]{2,3} "-" ("ab"){2} x?\nx ::= "!" x?', ["12-abab", "123-abab!!"], ["1-abab", "12-ab"]),
    "a rule that begins with itself": ('root ::= root "a" | "b"', ["b", "baa"], ["a", "bb"]),
}
