use super::*;

const NEIGHBOUR_ADDRESS: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 1, 1, 1));
const NEIGHBOUR_MAC: MacAddress = MacAddress([2, 0, 0, 0, 0, 1]);

fn time_from_ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

#[test]
fn silent_neighbour_becomes_unresolved() {
    let mut neighbours = ProbedNeighbours::default();
    neighbours.set_addresses(&[NEIGHBOUR_ADDRESS], time_from_ms(0));
    assert_eq!(
        neighbours.take_due_probes(time_from_ms(0)).0,
        [NeighbourProbe { address: NEIGHBOUR_ADDRESS, destination_mac: None }]
    );
    assert_eq!(
        neighbours.record_observed_mac(NEIGHBOUR_ADDRESS, NEIGHBOUR_MAC, time_from_ms(1)),
        Some(NeighbourMacChange { address: NEIGHBOUR_ADDRESS, mac: Some(NEIGHBOUR_MAC) })
    );
    assert_eq!(neighbours.record_observed_mac(NEIGHBOUR_ADDRESS, NEIGHBOUR_MAC, time_from_ms(2)), None);
    assert!(neighbours.take_due_probes(time_from_ms(500)).0.is_empty());
    // The first probe goes to the neighbour's MAC address. After a missed probe, probes are broadcast.
    assert_eq!(
        neighbours.take_due_probes(time_from_ms(1002)).0,
        [NeighbourProbe { address: NEIGHBOUR_ADDRESS, destination_mac: Some(NEIGHBOUR_MAC) }]
    );
    let mut lost_time = None;
    for ms in (1003..10_000).step_by(10) {
        let (probes, changes) = neighbours.take_due_probes(time_from_ms(ms));
        assert!(probes.iter().all(|probe| probe.destination_mac.is_none()));
        if changes == [NeighbourMacChange { address: NEIGHBOUR_ADDRESS, mac: None }] {
            assert_eq!(lost_time.replace(ms), None);
        }
    }
    assert!(lost_time.is_some_and(|ms| (2000..4000).contains(&ms)), "{lost_time:?}");
}

#[test]
fn probe_rate_is_limited_with_many_neighbours() {
    let addresses: Vec<IpAddr> = (0..1000u32).map(|n| Ipv4Addr::from(0x0a01_0000 + n).into()).collect();
    let mut neighbours = ProbedNeighbours::default();
    neighbours.set_addresses(&addresses, time_from_ms(0));
    let mut probed_addresses = BTreeSet::new();
    while probed_addresses.len() < addresses.len() {
        let (probes, _) = neighbours.take_due_probes(time_from_ms(1));
        assert!((1..=PROBES_PER_BURST).contains(&probes.len()));
        probed_addresses.extend(probes.iter().map(|probe| probe.address));
    }
    assert_eq!(neighbours.take_due_probes(time_from_ms(1)).0, []);
    assert!(
        addresses
            .iter()
            .all(|address| neighbours.record_observed_mac(*address, NEIGHBOUR_MAC, time_from_ms(2)).is_some())
    );
    assert_eq!(neighbours.next_probe_time(), Some(time_from_ms(2) + RESOLVED_NEIGHBOUR_PROBE_INTERVAL));
}

#[test]
fn changed_mac_address_is_reported_at_once() {
    let mut neighbours = ProbedNeighbours::default();
    neighbours.set_addresses(&[NEIGHBOUR_ADDRESS], time_from_ms(0));
    neighbours.record_observed_mac(NEIGHBOUR_ADDRESS, NEIGHBOUR_MAC, time_from_ms(1));
    let new_mac = MacAddress([2, 0, 0, 0, 0, 9]);
    assert_eq!(
        neighbours.record_observed_mac(NEIGHBOUR_ADDRESS, new_mac, time_from_ms(5)),
        Some(NeighbourMacChange { address: NEIGHBOUR_ADDRESS, mac: Some(new_mac) })
    );
    assert_eq!(neighbours.record_observed_mac(Ipv4Addr::new(10, 1, 1, 2).into(), NEIGHBOUR_MAC, time_from_ms(6)), None);
    neighbours.set_addresses(&[], time_from_ms(7));
    assert_eq!(neighbours.next_probe_time(), None);
}

#[test]
fn sender_of_arp_request_is_parsed() {
    let target_address = Ipv4Addr::new(10, 1, 1, 1);
    let request_frame = arp_request_frame(target_address, None, NEIGHBOUR_MAC, Ipv4Addr::new(10, 1, 0, 1));
    assert_eq!(parse_arp_sender(&request_frame), Some((Ipv4Addr::new(10, 1, 0, 1), NEIGHBOUR_MAC)));
    for length in 0..ARP_FRAME_BYTES {
        assert_eq!(parse_arp_sender(&request_frame[..length]), None);
    }
    let mut group_sender_frame = request_frame;
    group_sender_frame[22] = 0xff;
    assert_eq!(parse_arp_sender(&group_sender_frame), None);
}
