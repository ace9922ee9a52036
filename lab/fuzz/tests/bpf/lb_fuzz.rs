//! A short run of the fuzzer, and tests that it finds faults.

use std::net::Ipv4Addr;

use coreward_dataplane::test_run::{missing_bpf_rights, skip_if};
use coreward_fuzz::campaign::{Campaign, RunLimit};
use coreward_fuzz::change::Change;
use coreward_fuzz::epoch::Epoch;
use coreward_fuzz::frame::{self, EthernetIpHeader, TcpHeader, timestamp_option};
use coreward_fuzz::harness::{Harness, HarnessSetup, OWN_MAC};
use coreward_intf as intf;
use coreward_model::consistency::ServiceMode;
use coreward_model::cookie::{CookieKey, FleetKeys, KeyIndex};
use coreward_model::lb::{Outcome, Server};
use coreward_model::placement::{PlacementRule, PlacementTable};
use coreward_model::rss::seeded_rng;
use coreward_model::tuple::Protocol;
use coreward_model::{ServerId, ServiceAddress};

/// Counters that no generated packet increments.
const UNREACHED_COUNTERS: [intf::lb_counter; 1] = [intf::LB_COUNTER_DROP_INTERNAL];

#[test]
fn bpf_program_equals_its_reference_model() {
    skip_if!(missing_bpf_rights());
    let mut outcomes = vec![0; intf::LB_COUNTER_COUNT as usize];
    // Each seed has other services, servers and rules.
    for seed in 0..24 {
        let campaign = Campaign { seed, first_epoch: 0, limit: RunLimit::Packets(10_000), threads: 1 };
        let summary = campaign.run(|_| ()).unwrap();
        assert!(summary.failure.is_none(), "seed {seed}: {:?}", summary.failure);
        assert_eq!(summary.packets, 10_000);
        outcomes.iter_mut().zip(summary.outcomes).for_each(|(sum, count)| *sum += count);
    }
    for (counter, (name, count)) in (0..).zip(std::iter::zip(intf::LB_COUNTER_NAMES, outcomes)) {
        assert_eq!(count > 0, !UNREACHED_COUNTERS.contains(&counter), "{name}: {count} packets");
    }
}

#[test]
fn fuzzer_finds_a_different_reference_model() {
    skip_if!(missing_bpf_rights());
    // An epoch whose packets have cookies.
    let with_cookies = |seed| {
        let (mut epoch, mut established) = (Epoch::new(seed, true).unwrap(), 0);
        let count = |outcome: Outcome| established += usize::from(outcome.counter == intf::LB_COUNTER_ESTABLISHED);
        assert!(epoch.run(2_000, count).unwrap().is_none());
        (established > 200).then_some(epoch)
    };
    let mut epoch = (0..).find_map(with_cookies).unwrap();
    let zero = CookieKey { k0: 0, k1: 0 };
    epoch.harness.model.set_keys(FleetKeys { keys: [zero; 2], current: KeyIndex::First });
    let found = epoch.run(4_000, |_| ()).unwrap().expect("cookies are read with other keys");
    assert!(found.packets > 2_000 && found.packets < 2_200, "{found:?}");
}

#[test]
fn state_invisible_to_packets_is_compared() {
    skip_if!(missing_bpf_rights());
    let vip = (Ipv4Addr::new(10, 200, 0, 1), 80);
    let id = ServerId::try_from(7).unwrap();
    let keys = FleetKeys { keys: [CookieKey { k0: 1, k1: 2 }; 2], current: KeyIndex::First };
    let mut harness = Harness::new(HarnessSetup::new(OWN_MAC, keys), true).unwrap();
    let address = ServiceAddress { socket: vip.into(), protocol: Protocol::Tcp };
    let service_slot = harness.change(&Change::Services(vec![(address, ServiceMode::default())])).unwrap()[0];
    let server = Server { mac: Some([2, 0, 0, 0, 0, 7]), eligible: true };
    harness.change(&Change::Server(service_slot, id, Some(server))).unwrap();
    let table = PlacementTable::random(PlacementRule::RoundRobin, 1, 1, &[id], &mut seeded_rng(1, 0));
    harness.change(&Change::Table(service_slot, table)).unwrap();

    let ip = EthernetIpHeader {
        mac: OWN_MAC,
        source: Ipv4Addr::new(10, 1, 0, 7),
        destination: vip.0,
        protocol: frame::TCP,
        identification: 0,
        fragment: 0,
        option_words: 0,
        tos_and_ttl: [0, 64],
    };
    let syn = |port: u16| {
        let segment = TcpHeader { ports: (port, vip.1), flags: 2, options: timestamp_option(1, 0).to_vec() };
        let mut packet = Vec::new();
        ip.append_frame(&mut packet, |packet| segment.append_segment(packet, (1, 0), 0));
        packet
    };
    let (outcome, difference) = harness.process_packet(&syn(1)).unwrap();
    assert_eq!((outcome.counter, difference.is_none()), (intf::LB_COUNTER_NEW_CONNECTION, true));
    assert!(harness.compare_state().is_none());
    harness.model.receive(&mut syn(2), 5);
    assert_eq!(harness.compare_state().unwrap().subject, "the counter of round robin");
}
