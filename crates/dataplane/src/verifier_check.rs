//! Check that this kernel accepts the BPF programs, by loading and closing each of them without attaching it.

use std::mem::MaybeUninit;
use std::net::Ipv4Addr;
use std::os::fd::{AsFd as _, BorrowedFd};

use anyhow::Context as _;
use coreward_intf as intf;
use libbpf_rs::query::ProgInfoIter;
use libbpf_rs::skel::{OpenSkel as _, Skel as _, SkelBuilder as _};
use libbpf_rs::{Object, ObjectBuilder, Program};

use crate::dispatch::{self, DispatchPolicy, PayloadRequestType, RequestIdPosition};
use crate::skeleton;
use crate::skeleton::dispatch::DispatchSkelBuilder;
use crate::skeleton::lb::LbSkelBuilder;

/// Loads the BPF objects with the given names. Returns each object's name and whether the kernel accepted it.
pub fn try_load_programs(object_names: &[&str]) -> Vec<(&'static str, anyhow::Result<()>)> {
    let selected_objects = skeleton::OBJECTS.into_iter().filter(|(name, _)| object_names.contains(name));
    selected_objects.map(|(name, object)| (name, verify_all_variants(name, object).map(drop))).collect()
}

/// Loads every BPF object of the data plane. Returns each object's name and whether the kernel accepted it.
pub fn try_load_every_program() -> Vec<(&'static str, anyhow::Result<()>)> {
    skeleton::OBJECTS.into_iter().map(|(name, object)| (name, verify_all_variants(name, object).map(drop))).collect()
}

/// Cost of the kernel's verification of one BPF program in one variant. A variant is a set of compile-time constants.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VerifierCost {
    /// Names of the variant and the program, separated by a comma.
    pub variant_and_program_names: String,
    /// Number of instructions that the verifier processed. The kernel allows 1,000,000 (BPF_COMPLEXITY_LIMIT_INSNS in
    /// include/linux/bpf_verifier.h).
    pub verified_instructions: u32,
}

/// Loads every variant of every program, and returns the verification costs. Fails when the kernel rejects a program.
pub fn measure_verifier_costs() -> anyhow::Result<Vec<VerifierCost>> {
    concatenate_verifier_costs(skeleton::OBJECTS.into_iter().map(|(name, object)| verify_all_variants(name, object)))
}

/// Returns the number of instructions that the verifier has processed for a loaded program. Fails when the kernel does
/// not list the program.
fn verified_instruction_count(program: BorrowedFd<'_>) -> anyhow::Result<u32> {
    let id = Program::id_from_fd(program).context("the program's id")?;
    ProgInfoIter::default()
        .find(|info| info.id == id)
        .map(|info| info.verified_insns)
        .context("the program is not listed")
}

fn verify_all_variants(name: &str, object: &[u8]) -> anyhow::Result<Vec<VerifierCost>> {
    match name {
        // The kernel removes code for features that a variant does not use. So each placement rule and each consistency
        // mode is loaded alone, and all of them together.
        "lb" => {
            let (rule_names, mode_names) = (&intf::PLACEMENT_RULE_NAMES, &intf::CONSISTENCY_NAMES);
            let rule_variants =
                rule_names.iter().enumerate().map(|(rule, name)| (*name, 1 << rule, STATELESS_MODE_BIT));
            let consistency_variants =
                mode_names.iter().enumerate().map(|(mode, name)| (*name, TABLE_RULE_BIT, 1 << mode));
            let full_variant = ("all", (1 << intf::PLACEMENT_RULE_COUNT) - 1, (1 << intf::CONSISTENCY_COUNT) - 1);
            let variants = rule_variants.chain(consistency_variants).chain([full_variant]);
            concatenate_verifier_costs(
                variants.map(|(variant, rule_bits, mode_bits)| verify_lb_variant(variant, rule_bits, mode_bits)),
            )
        }
        "dispatch" => {
            let policy_variants = DispatchPolicy::all().flat_map(|policy| [(policy, false), (policy, true)]);
            concatenate_verifier_costs(policy_variants.map(|(policy, observes_service_times)| {
                verify_dispatch_variant(policy, observes_service_times)
                    .with_context(|| format!("with the policy {}", policy.name()))
            }))
        }
        _ => verifier_costs_by_program(name, &ObjectBuilder::default().open_memory(object)?.load()?),
    }
}

const STATELESS_MODE_BIT: u32 = 1 << intf::CONSISTENCY_STATELESS;
const TABLE_RULE_BIT: u32 = 1 << intf::PLACEMENT_RULE_TABLE;

fn concatenate_verifier_costs(
    variants: impl Iterator<Item = anyhow::Result<Vec<VerifierCost>>>,
) -> anyhow::Result<Vec<VerifierCost>> {
    Ok(variants.collect::<anyhow::Result<Vec<_>>>()?.concat())
}

fn verifier_costs_by_program(variant: &str, object: &Object) -> anyhow::Result<Vec<VerifierCost>> {
    let read_verifier_cost = |program: Program<'_>| {
        let variant_and_program_name = format!("{variant}, {}", program.name().to_string_lossy());
        Ok(VerifierCost {
            variant_and_program_names: variant_and_program_name,
            verified_instructions: verified_instruction_count(program.as_fd())?,
        })
    };
    object.progs().map(read_verifier_cost).collect()
}

fn verify_dispatch_variant(policy: DispatchPolicy, observes_service_times: bool) -> anyhow::Result<Vec<VerifierCost>> {
    let unmatched_type = PayloadRequestType { payload_value: [1; 8], payload_mask: [0; 8], priority_class: 1 };
    let options = dispatch::DispatchOptions {
        service_address: (Ipv4Addr::UNSPECIFIED, 53).into(),
        policy,
        request_id_position: observes_service_times.then_some(RequestIdPosition {
            offset_in_request: 0,
            offset_in_response: 0,
            byte_count: 2,
        }),
        type_offset: 0,
        request_types: if observes_service_times {
            vec![unmatched_type; dispatch::MAX_REQUEST_TYPES]
        } else {
            Vec::new()
        },
        default_priority_class: 0,
        measures_service_times: observes_service_times,
    };
    let mut object_storage = MaybeUninit::uninit();
    let mut open_skeleton = DispatchSkelBuilder::default().open(&mut object_storage)?;
    dispatch::set_program_constants(&mut open_skeleton, &options)?;
    let variant = format!("dispatch {}{}", policy.name(), if observes_service_times { ", learning" } else { "" });
    verifier_costs_by_program(&variant, open_skeleton.load()?.object())
}

fn verify_lb_variant(variant: &str, rule_bits: u32, mode_bits: u32) -> anyhow::Result<Vec<VerifierCost>> {
    let mut object_storage = MaybeUninit::uninit();
    let mut open_skeleton = LbSkelBuilder::default().open(&mut object_storage)?;
    let rodata = open_skeleton.maps.rodata_data.as_deref_mut().context("lb.bpf.c without read-only data")?;
    rodata.rules_in_use = rule_bits;
    rodata.modes_in_use = mode_bits;
    let has_all_features = !mode_bits.is_power_of_two();
    rodata.timestamps_off_in_use = has_all_features;
    rodata.timestamps_lb_in_use = has_all_features;
    rodata.udp_in_use = has_all_features;
    rodata.ipv6_in_use = has_all_features;
    rodata.traffic_in_use = has_all_features;
    rodata.capture_in_use = has_all_features;
    rodata.packets_read_clock = has_all_features;
    rodata.vlans_in_use = has_all_features;
    rodata.vlans_or_capture_in_use = has_all_features;
    let describe_variant =
        || format!("with the placement rules {rule_bits:#b} and the modes of consistency {mode_bits:#b}");
    verifier_costs_by_program(&format!("lb {variant}"), open_skeleton.load().with_context(describe_variant)?.object())
}
