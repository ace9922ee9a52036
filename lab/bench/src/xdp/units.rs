//! Unit costs: times of single operations of `lb.bpf.c` (ns), which explain its total.

use std::mem::MaybeUninit;
use std::os::fd::AsFd as _;

use anyhow::Context as _;
use libbpf_rs::skel::{OpenSkel as _, SkelBuilder as _};

use super::MeasurementLength;
use super::interleaved::{Program, Turn, difference, fastest_difference, median_of, quartiles, run_interleaved};
use super::runner::{Packet, Runner};
use super::workload::request;
use crate::report::Table;

#[allow(missing_docs, clippy::all, clippy::undocumented_unsafe_blocks, unsafe_op_in_unsafe_fn, dead_code)]
mod skeleton {
    include!(concat!(env!("OUT_DIR"), "/units.skel.rs"));
}

/// Number of operations per run of a program: REPEATS of bpf/units.bpf.c.
const REPEATS: f64 = 64.0;

/// Measures the time of each single operation. Fails without the right to load BPF programs.
pub fn measure(length: &MeasurementLength) -> anyhow::Result<Table> {
    let mut storage = MaybeUninit::uninit();
    let open = skeleton::UnitsSkelBuilder::default().open(&mut storage).context("opening units.bpf.o")?;
    let loaded = open.load().context("loading units.bpf.c")?;
    let programs = &loaded.progs;
    let units = [
        ("call of a BPF function, and its return", programs.unit_call.as_fd()),
        ("atomic addition", programs.unit_atomic_add.as_fd()),
        ("load, compare-and-swap", programs.unit_compare_and_swap.as_fd()),
        ("look-up in an array map, load, store", programs.unit_look_up.as_fd()),
        ("obfuscation: keyed hash of a connection, reveal of its cookie", programs.unit_reveal_cookie.as_fd()),
    ];
    let runner = Runner::new(&request(), &[Packet::default()], 0)?;
    let floor = Turn::new(&runner, Program::Floor(runner.empty.as_fd()));
    let measured = units.iter().map(|(_, program)| Turn::new(&runner, Program::Floor(*program)));
    let turns: Vec<Turn<'_>> = std::iter::once(floor).chain(measured).collect();
    let times = run_interleaved(&turns, length.rounds, length.packets)?;
    let each = |rounds: &[f64]| rounds.iter().map(|time| time / REPEATS).collect::<Vec<f64>>();
    let empty = each(&times[0]);
    let mut table = Table::new(&["operation, in the cache", "ns each", "quartiles", "fastest rounds"]);
    for ((name, _), time) in units.iter().zip(&times[1..]) {
        let time = each(time);
        let above_empty = difference(&time, &empty);
        let fastest = fastest_difference(&time, &empty);
        table.add_row([(*name).into(), median_of(&above_empty).into(), quartiles(&above_empty).into(), fastest.into()]);
    }
    Ok(table)
}
