//! Whether this kernel takes the programs: each is loaded, attached to nothing, and let go.

use std::mem::MaybeUninit;
use std::net::Ipv4Addr;

use anyhow::Context as _;
use coreward_intf as intf;
use libbpf_rs::ObjectBuilder;
use libbpf_rs::skel::{OpenSkel as _, SkelBuilder as _};

use crate::dispatch::{self, Policy, RequestId, RequestType};
use crate::skeleton;
use crate::skeleton::dispatch::DispatchSkelBuilder;
use crate::skeleton::lb::LbSkelBuilder;

/// Loads the objects of these names; gives each with what the kernel said.
pub fn load_programs(names: &[&str]) -> Vec<(&'static str, anyhow::Result<()>)> {
    let named = skeleton::OBJECTS.into_iter().filter(|(name, _)| names.contains(name));
    named.map(|(name, object)| (name, load(name, object))).collect()
}

/// Loads every program; gives the name of each with what the kernel said.
pub fn load_every_program() -> Vec<(&'static str, anyhow::Result<()>)> {
    skeleton::OBJECTS.into_iter().map(|(name, object)| (name, load(name, object))).collect()
}

fn load(name: &str, object: &[u8]) -> anyhow::Result<()> {
    match name {
        // Each rule and each mode by itself, and all at once: what a variant has less than that is not compiled in.
        "lb" => {
            let each = |count: u32| (0..count).map(|n| 1 << n);
            let (all_rules, all_modes) = ((1 << intf::PLACEMENT_RULE_COUNT) - 1, (1 << intf::CONSISTENCY_COUNT) - 1);
            each(intf::PLACEMENT_RULE_COUNT).try_for_each(|rule| load_lb(rule, 1 << intf::CONSISTENCY_STATELESS))?;
            each(intf::CONSISTENCY_COUNT).try_for_each(|mode| load_lb(1 << intf::PLACEMENT_RULE_TABLE, mode))?;
            load_lb(all_rules, all_modes)?;
        }
        "dispatch" => {
            for (policy, learn, ids) in Policy::all().flat_map(|policy| [(policy, false, false), (policy, true, true)])
            {
                load_dispatch(policy, learn, ids).with_context(|| format!("with the policy {}", policy.name()))?;
            }
        }
        _ => drop(ObjectBuilder::default().open_memory(object)?.load()?),
    }
    Ok(())
}

fn load_dispatch(policy: Policy, learn: bool, ids: bool) -> anyhow::Result<()> {
    let match_nothing = RequestType { value: [1; 8], mask: [0; 8], class: 1 };
    let options = dispatch::Options {
        service: (Ipv4Addr::UNSPECIFIED, 53).into(),
        policy,
        request_id: ids.then_some(RequestId { offset: 0, response_offset: 0, bytes: 2 }),
        type_offset: 0,
        types: if ids { vec![match_nothing; dispatch::MAX_TYPES] } else { Vec::new() },
        other_class: 0,
        learn,
    };
    let mut storage = MaybeUninit::uninit();
    let mut open = DispatchSkelBuilder::default().open(&mut storage)?;
    dispatch::set_constants(&mut open, &options)?;
    open.load().map(drop).map_err(Into::into)
}

fn load_lb(rules: u32, modes: u32) -> anyhow::Result<()> {
    let mut storage = MaybeUninit::uninit();
    let mut open = LbSkelBuilder::default().open(&mut storage)?;
    let rodata = open.maps.rodata_data.as_deref_mut().context("lb.bpf.c without read-only data")?;
    rodata.rules_in_use = rules;
    rodata.modes_in_use = modes;
    let several = !modes.is_power_of_two();
    rodata.timestamps_off_in_use = several;
    rodata.timestamps_lb_in_use = several;
    rodata.udp_in_use = several;
    rodata.traffic_in_use = several;
    rodata.capture_in_use = several;
    let what = || format!("with the placement rules {rules:#b} and the modes of consistency {modes:#b}");
    open.load().map(drop).with_context(what)
}
