"""Loops and instructions in a listing of machine code, and where the tools for it are looked for."""

import pytest

from pallas_kernels import machine_code

# A loop over tiles with two loops over steps in it, a wait without exponentials, and the slow path behind the end.
LISTING = """
.L_x_0:
        /*0000*/                   LDG.E R0, [R2.64] ;
.L_x_1:
        /*0010*/                   MUFU.EX2 R1, R0 ;
        /*0020*/                   FFMA R3, R1, R0, R3 ;
        /*0030*/              @P0  BRA `(.L_x_1) ;
.L_x_2:
        /*0040*/                   SYNCS.PHASECHK P1, [R4] ;
        /*0050*/             @!P1  BRA `(.L_x_2) ;
.L_x_3:
        /*0060*/                   MUFU.EX2 R1, R0 ;
        /*0070*/                   MUFU.RCP R1, R1 ;
        /*0080*/                   FMUL R3, R1, R0 ;
        /*0090*/              @P2  BRA `(.L_x_3) ;
        /*00a0*/             @!P3  BRA `(.L_x_0) ;
        /*00b0*/                   EXIT ;
.L_x_4:
        /*00c0*/                   MUFU.EX2 R1, R0 ;
        /*00d0*/                   BRA `(.L_x_2) ;
"""


def test_loops_are_nested_and_counted():
    (tile,) = machine_code.find_loops(LISTING)
    first, second = tile.inner
    assert (first.instructions, first.exponentials, first.special, first.inner) == (3, 1, 1, [])
    assert (second.instructions, second.exponentials, second.special) == (4, 1, 2)
    assert second.mix == {"MUFU.EX2": 1, "MUFU.RCP": 1, "FMUL": 1, "BRA": 1}
    # Its own part: the load, the wait and the two branches; what is in inner loops is counted there.
    assert tile.mix == {"LDG.E": 1, "SYNCS.PHASECHK": 1, "BRA": 2}
    assert tile.instructions == 4 and tile.exponentials == 0


def test_without_exponentials_there_is_no_loop():
    assert machine_code.find_loops(LISTING.replace("MUFU.EX2", "FADD")) == []


def test_a_tool_that_is_not_there():
    with pytest.raises(FileNotFoundError, match="no-such-tool is neither in a wheel"):
        machine_code.tool("no-such-tool")
