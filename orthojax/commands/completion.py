"""Completion of commands and flags in a shell: a script with every word in it, so that a key press starts no Python."""

from collections.abc import Mapping, Sequence

from orthojax.errors import UserError, nearest

_BASH = """\
# orthojax: eval "$(orthojax completion {shell})" in ~/.{shell}rc
_orthojax() {{
  local words cur=${{COMP_WORDS[COMP_CWORD]}}
  [[ $cur == "=" || ${{COMP_WORDS[COMP_CWORD-1]}} == "=" ]] && return  # a value: the shell's own completion of files
  if [[ $COMP_CWORD -eq 1 ]]; then words="{commands}"; else
    case ${{COMP_WORDS[1]}} in
{cases}
    esac
  fi
  COMPREPLY=($(compgen -W "$words" -- "$cur"))
  [[ ${{COMPREPLY[0]}} == *= ]] && compopt -o nospace 2>/dev/null
}}
complete -o default -o bashdefault -F _orthojax orthojax"""
_SHELLS = {"bash": _BASH, "zsh": "autoload -U +X bashcompinit && bashcompinit\n" + _BASH}


def script(shell: str = "", *, words: Mapping[str, Sequence[str]]) -> str:
    """The script for a shell, given the words of every command.

    Raises:
      UserError: For another shell.
    """
    if shell not in _SHELLS:
        allowed, hint = " | ".join(_SHELLS), nearest(shell, _SHELLS)
        raise UserError(f"no completion for the shell {shell!r}", allowed=f"orthojax completion {allowed}", hint=hint)
    cases = "\n".join(f'      {name}) words="{" ".join(of)}" ;;' for name, of in words.items())
    return _SHELLS[shell].format(shell=shell, commands=" ".join(words), cases=cases)
