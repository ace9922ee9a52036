//! Measures the times of single operations in `lb.bpf.c` (ns), which explain its total cost.

use std::mem::MaybeUninit;
use std::os::fd::AsFd as _;

use anyhow::Context as _;
use libbpf_rs::skel::{OpenSkel as _, SkelBuilder as _};

use super::MeasurementLength;
use super::interleaved::{
    InterleavedProgram, MeasuredProgram, difference_of_fastest_rounds, differences_by_round,
    measure_interleaved_programs, median_of_rounds, quartile_range_text,
};
use super::runner::{PacketRunner, PacketVariation};
use super::workload::request_frame_template;
use crate::report::ReportTable;

#[allow(missing_docs, clippy::all, clippy::undocumented_unsafe_blocks, unsafe_op_in_unsafe_fn, dead_code)]
mod skeleton {
    include!(concat!(env!("OUT_DIR"), "/units.skel.rs"));
}

/// Number of operations in one run of a program, which is REPEATS of bpf/units.bpf.c.
const OPERATIONS_PER_RUN: f64 = 64.0;

/// Measures the time of each operation of the BPF programs separately. Fails without the right to load BPF programs.
pub fn measure_bpf_operations(length: &MeasurementLength) -> anyhow::Result<ReportTable> {
    let mut skeleton_storage = MaybeUninit::uninit();
    let opened_skeleton =
        skeleton::UnitsSkelBuilder::default().open(&mut skeleton_storage).context("opening units.bpf.o")?;
    let loaded_skeleton = opened_skeleton.load().context("loading units.bpf.c")?;
    let programs = &loaded_skeleton.progs;
    let operations = [
        ("call of a BPF function, and its return", programs.unit_call.as_fd()),
        ("atomic addition", programs.unit_atomic_add.as_fd()),
        ("load, compare-and-swap", programs.unit_compare_and_swap.as_fd()),
        ("look-up in an array map, load, store", programs.unit_look_up.as_fd()),
        ("obfuscation: keyed hash of a connection, reveal of its cookie", programs.unit_reveal_cookie.as_fd()),
    ];
    let runner = PacketRunner::new(&request_frame_template(), &[PacketVariation::default()], 0)?;
    let empty_program = InterleavedProgram::new(&runner, MeasuredProgram::Baseline(runner.empty_program.as_fd()));
    let operation_programs =
        operations.iter().map(|(_, program)| InterleavedProgram::new(&runner, MeasuredProgram::Baseline(*program)));
    let interleaved_programs: Vec<InterleavedProgram<'_>> =
        std::iter::once(empty_program).chain(operation_programs).collect();
    let ns_per_run = measure_interleaved_programs(&interleaved_programs, length.rounds, length.packets)?;
    let ns_per_operation = |rounds: &[f64]| rounds.iter().map(|time| time / OPERATIONS_PER_RUN).collect::<Vec<f64>>();
    let empty_program_ns = ns_per_operation(&ns_per_run[0]);
    let mut table = ReportTable::new(&["operation, in the cache", "ns each", "quartiles", "fastest rounds"]);
    for ((name, _), ns_by_round) in operations.iter().zip(&ns_per_run[1..]) {
        let operation_ns = ns_per_operation(ns_by_round);
        let ns_above_empty_program = differences_by_round(&operation_ns, &empty_program_ns);
        let fastest_ns_above_empty_program = difference_of_fastest_rounds(&operation_ns, &empty_program_ns);
        table.add_row([
            (*name).into(),
            median_of_rounds(&ns_above_empty_program).into(),
            quartile_range_text(&ns_above_empty_program).into(),
            fastest_ns_above_empty_program.into(),
        ]);
    }
    Ok(table)
}
