//! What is counted when services come and go.

use std::net::Ipv4Addr;

use coreward_dataplane::lb::Counters;
use coreward_intf as intf;
use coreward_model::consistency::ServiceMode;
use coreward_model::placement::Rule;
use coreward_model::rss::seeded_rng;

use crate::support::balancer::{Balancer, XDP_TX, random_table, service};
use crate::support::{SYN, Tcp, may_load_bpf, usual_timestamp};

const VIP: (Ipv4Addr, u16) = (Ipv4Addr::new(10, 200, 0, 1), 80);
const OTHER_VIP: (Ipv4Addr, u16) = (Ipv4Addr::new(10, 200, 0, 2), 443);

#[test]
fn new_service_in_the_place_of_a_removed_one_starts_at_zero() {
    if !may_load_bpf("new_service_in_the_place_of_a_removed_one_starts_at_zero") {
        return;
    }
    let mut rng = seeded_rng(140, 0);
    let mut balancer = Balancer::new(&[VIP], &mut rng);
    let servers = balancer.replace_servers(0, 4, &mut rng);
    balancer.install(0, &random_table(Rule::Table, 1, 1, &servers, &mut rng));
    for port in 1024..1034 {
        let syn =
            Tcp { flags: SYN, options: usual_timestamp(1, 0), ..Tcp::new((Ipv4Addr::new(192, 0, 2, 1), port), VIP) };
        assert_eq!(balancer.run(&syn.frame()).0, XDP_TX);
    }
    let (index, total) = (balancer.services[0], balancer.lb.total_counters());
    assert_eq!(balancer.lb.counters(index).packets[intf::LB_COUNTER_FIRST as usize], 10);
    assert_eq!(balancer.lb.opened(index), 10);

    let mut replace = |vip| balancer.lb.set_services(&[(service(vip), ServiceMode::default())]).unwrap()[0];
    assert_eq!(replace(OTHER_VIP), index, "the place is used again");
    assert_eq!(balancer.lb.counters(index), Counters::default());
    assert_eq!(balancer.lb.opened(index), 0);
    assert_eq!(balancer.lb.total_counters(), total, "what removed services counted stays in the total");
}
