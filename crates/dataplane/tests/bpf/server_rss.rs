//! Comparison of predicted receive queues (`bpf/server/rss_mapping.h`) with `coreward_model::rss`: samples of SYNs, and
//! steering.

use std::collections::BTreeSet;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::AsFd as _;

use coreward_dataplane::steer::SteerProgram;
use coreward_intf as intf;
use coreward_model::FourTuple;
use coreward_model::consistency::ServiceMode;
use coreward_model::rss::{IndirectionTable, InputTransform, RssConfig, RssKey};
use coreward_model::tuple::address_from_words;
use socket2::{Domain, SockRef, Socket, Type};

use crate::support::server_env::{TIMEOUT, TestEnv, vip};
use crate::support::{Family, missing_bpf_rights, skip_if};

const QUEUE_COUNT: u16 = 4;
const CONNECTION_COUNT: usize = 32;

fn rss(input: InputTransform) -> RssConfig {
    let indirection_table = IndirectionTable::balanced(1, 128, QUEUE_COUNT).unwrap();
    RssConfig { key: RssKey::microsoft().with_input(input), indirection_table }
}

/// Returns a test environment for each address family and each input transform.
fn start_envs() -> impl Iterator<Item = (TestEnv, RssConfig)> {
    let cases = Family::BOTH.into_iter().flat_map(|family| InputTransform::ALL.map(|input| (family, input)));
    cases.map(|(family, input)| {
        let (mut env, rss) = (TestEnv::of(family, ServiceMode::default()), rss(input));
        env.programs.set_rss(Some(&rss), 1);
        (env, rss)
    })
}

#[test]
fn syn_samples_equal_the_model() {
    skip_if!(missing_bpf_rights());
    for (env, rss) in start_envs() {
        let listener = env.listen();
        let connections: Vec<_> = (0..CONNECTION_COUNT).map(|_| env.connection(&listener)).collect();
        let clients: BTreeSet<SocketAddr> =
            connections.iter().map(|(client, _)| client.local_addr().unwrap()).collect();
        // The client's device has several queues. The kernel records no queue for SYNs from the first queue.
        let samples = env.programs.samples(0);
        assert!(samples.len() >= CONNECTION_COUNT / 4, "{} samples", samples.len());
        for sample in &samples {
            let socket = |address, port| SocketAddr::new(address_from_words(address), u16::from_be(port));
            let client = socket(sample.source_address, sample.source_port);
            assert!(clients.contains(&client), "{client}");
            assert_eq!(socket(sample.destination_address, sample.destination_port), vip(env.family));
            let hash = rss.key.toeplitz(&FourTuple::new(client, vip(env.family)).unwrap().bytes());
            let predicted = (sample.hash, sample.predicted_queue);
            assert_eq!(
                predicted,
                (hash, rss.indirection_table.queue(hash)),
                "{client} {:?}",
                rss.key.input_transform()
            );
        }
        let counted = [intf::SERVER_COUNTER_RSS_MATCHED, intf::SERVER_COUNTER_RSS_MISMATCHED].map(|c| env.counter(c));
        assert_eq!(counted.iter().sum::<u64>(), samples.len() as u64);
    }
}

/// Returns listening sockets at the service's address, all in one SO_REUSEPORT group.
fn listeners(env: &TestEnv) -> Vec<TcpListener> {
    let domain = if env.family == Family::Ipv4 { Domain::IPV4 } else { Domain::IPV6 };
    let listener = || {
        let socket = Socket::new(domain, Type::STREAM, None).unwrap();
        socket.set_reuse_port(true).unwrap();
        socket.bind(&vip(env.family).into()).unwrap();
        socket.listen(64).unwrap();
        // The read timeout also limits accept().
        SockRef::from(&socket).set_read_timeout(Some(TIMEOUT)).unwrap();
        socket.into()
    };
    env.pair.server.run_inside(|| (0..QUEUE_COUNT).map(|_| listener()).collect())
}

#[test]
fn connections_reach_the_socket_of_their_queue() {
    skip_if!(missing_bpf_rights());
    for (env, rss) in start_envs() {
        let listeners = listeners(&env);
        let steer = SteerProgram::load(&env.pins.path(), "service", env.programs.rss_map()).unwrap();
        let slots: Vec<_> = listeners.iter().map(|socket| steer.add_socket(socket.as_fd()).ok()).collect();
        steer.set_queues(&slots);
        steer.attach(listeners[0].as_fd()).unwrap();
        for _ in 0..CONNECTION_COUNT {
            let client = env.connect();
            let address = client.local_addr().unwrap();
            let hash = rss.key.toeplitz(&FourTuple::new(address, vip(env.family)).unwrap().bytes());
            let queue = usize::from(rss.indirection_table.queue(hash));
            assert_eq!(listeners[queue].accept().unwrap().1, address);
        }
        assert_eq!(steer.counters()[intf::STEER_COUNTER_STEERED as usize], CONNECTION_COUNT as u64);
    }
}
