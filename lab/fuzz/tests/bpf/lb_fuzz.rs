//! A short run of the fuzzer, and tests that it finds faults.

use std::net::Ipv4Addr;

use coreward_dataplane::test_run::{missing_bpf_rights, skip_if};
use coreward_fuzz::campaign::{FuzzCampaign, FuzzCampaignLimit};
use coreward_fuzz::frame::{self, EthernetIpHeader, TcpHeader, timestamp_option};
use coreward_fuzz::fuzz_epoch::FuzzEpoch;
use coreward_fuzz::harness::{FuzzHarness, FuzzHarnessSetup, LOAD_BALANCER_MAC};
use coreward_fuzz::state_change::LoadBalancerStateChange;
use coreward_intf as intf;
use coreward_model::consistency::ServiceSettings;
use coreward_model::cookie::{CookieKey, CookieKeyIndex, FleetCookieKeys};
use coreward_model::lb::{FrameOutcome, ServerMapEntry};
use coreward_model::placement::{PlacementRule, PlacementTable};
use coreward_model::rss::seeded_rng;
use coreward_model::tuple::TransportProtocol;
use coreward_model::{ServerId, ServiceAddress};

/// Counters that no generated packet increments.
const UNREACHED_COUNTERS: [intf::lb_counter; 1] = [intf::LB_COUNTER_DROP_INTERNAL];

#[test]
fn bpf_program_equals_reference_model_on_generated_packets() {
    skip_if!(missing_bpf_rights());
    let mut packets_by_outcome = vec![0; intf::LB_COUNTER_COUNT as usize];
    // Each seed leads to other services, servers and rules.
    for seed in 0..24 {
        let campaign = FuzzCampaign {
            seed,
            first_epoch_number: 0,
            limit: FuzzCampaignLimit::MaxPacketCount(10_000),
            thread_count: 1,
        };
        let summary = campaign.run_campaign(|_| ()).unwrap();
        assert!(summary.failure.is_none(), "seed {seed}: {:?}", summary.failure);
        assert_eq!(summary.packet_count, 10_000);
        packets_by_outcome.iter_mut().zip(summary.packets_by_outcome).for_each(|(sum, count)| *sum += count);
    }
    for (counter, (name, count)) in (0..).zip(std::iter::zip(intf::LB_COUNTER_NAMES, packets_by_outcome)) {
        assert_eq!(count > 0, !UNREACHED_COUNTERS.contains(&counter), "{name}: {count} packets");
    }
}

#[test]
fn fuzzer_detects_a_reference_model_with_different_keys() {
    skip_if!(missing_bpf_rights());
    // Returns the epoch of this seed if enough of its packets have cookies.
    let epoch_with_cookies = |seed| {
        let (mut epoch, mut established_count) = (FuzzEpoch::new(seed, true).unwrap(), 0);
        let count_established =
            |outcome: FrameOutcome| established_count += usize::from(outcome.counter == intf::LB_COUNTER_ESTABLISHED);
        assert!(epoch.run_until_packet_number(2_000, count_established).unwrap().is_none());
        (established_count > 200).then_some(epoch)
    };
    let mut epoch = (0..).find_map(epoch_with_cookies).unwrap();
    let zero_key = CookieKey { k0: 0, k1: 0 };
    epoch
        .harness
        .model
        .set_cookie_keys(FleetCookieKeys { keys: [zero_key; 2], current_key_index: CookieKeyIndex::First });
    let mismatch = epoch.run_until_packet_number(4_000, |_| ()).unwrap().expect("cookies are read with other keys");
    assert!(mismatch.processed_packet_count > 2_000 && mismatch.processed_packet_count < 2_200, "{mismatch:?}");
}

#[test]
fn state_comparison_finds_differences_that_no_packet_shows() {
    skip_if!(missing_bpf_rights());
    let service_address = (Ipv4Addr::new(10, 200, 0, 1), 80);
    let server_id = ServerId::try_from(7).unwrap();
    let keys = FleetCookieKeys { keys: [CookieKey { k0: 1, k1: 2 }; 2], current_key_index: CookieKeyIndex::First };
    let mut harness = FuzzHarness::new(FuzzHarnessSetup::new(LOAD_BALANCER_MAC, keys), true).unwrap();
    let address = ServiceAddress { vip_and_port: service_address.into(), protocol: TransportProtocol::Tcp };
    let service_slot = harness
        .apply_change(&LoadBalancerStateChange::ReplaceServices(vec![(address, ServiceSettings::default())]))
        .unwrap()[0];
    let server = ServerMapEntry { mac: Some([2, 0, 0, 0, 0, 7]), is_eligible: true };
    harness.apply_change(&LoadBalancerStateChange::SetServer(service_slot, server_id, Some(server))).unwrap();
    let table = PlacementTable::random(PlacementRule::RoundRobin, 1, 1, &[server_id], &mut seeded_rng(1, 0));
    harness.apply_change(&LoadBalancerStateChange::InstallPlacementTable(service_slot, table)).unwrap();

    let ip_header = EthernetIpHeader {
        destination_mac: LOAD_BALANCER_MAC,
        source: Ipv4Addr::new(10, 1, 0, 7),
        destination: service_address.0,
        protocol: frame::PROTOCOL_TCP,
        ip_identification: 0,
        fragment_flags_and_offset: 0,
        option_word_count: 0,
        tos_and_ttl: [0, 64],
    };
    let build_syn_frame = |port: u16| {
        let tcp_header = TcpHeader {
            source_and_destination_ports: (port, service_address.1),
            tcp_flags: 2,
            options: timestamp_option(1, 0).to_vec(),
        };
        let mut packet = Vec::new();
        ip_header.append_frame(&mut packet, |packet| tcp_header.append_segment(packet, (1, 0), 0));
        packet
    };
    let (outcome, difference) = harness.process_packet(&build_syn_frame(1)).unwrap();
    assert_eq!((outcome.counter, difference.is_none()), (intf::LB_COUNTER_NEW_CONNECTION, true));
    assert!(harness.compare_state().is_none());
    harness.model.process_frame(&mut build_syn_frame(2), 5);
    assert_eq!(harness.compare_state().unwrap().compared_item, "the counter of round robin");
}
