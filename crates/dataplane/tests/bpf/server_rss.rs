//! Comparison of the receive queues that `bpf/server/rss_mapping.h` predicts with `coreward_model::rss`.

use std::collections::BTreeSet;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::AsFd as _;

use coreward_dataplane::steer::ConnectionSteeringProgram;
use coreward_intf as intf;
use coreward_model::FourTuple;
use coreward_model::consistency::ServiceSettings;
use coreward_model::rss::{IndirectionTable, RssConfig, RssInputTransform, RssKey};
use coreward_model::tuple::address_from_words;
use socket2::{Domain, SockRef, Socket, Type};

use crate::support::server_env::{SOCKET_TIMEOUT, ServerTestEnv, vip_address};
use crate::support::{AddressFamily, missing_bpf_rights, skip_if};

const QUEUE_COUNT: u16 = 4;
const CONNECTION_COUNT: usize = 32;

fn new_rss_config(hash_input_transform: RssInputTransform) -> RssConfig {
    let indirection_table = IndirectionTable::draw_balanced_entries(1, 128, QUEUE_COUNT).unwrap();
    RssConfig {
        key: RssKey::microsoft_verification_key().with_input_transform(hash_input_transform),
        indirection_table,
    }
}

fn start_test_envs() -> impl Iterator<Item = (ServerTestEnv, RssConfig)> {
    let families_and_transforms =
        AddressFamily::BOTH.into_iter().flat_map(|family| RssInputTransform::ALL.map(|input| (family, input)));
    families_and_transforms.map(|(family, input)| {
        let (mut env, rss) =
            (ServerTestEnv::start_for_family(family, ServiceSettings::default()), new_rss_config(input));
        env.programs.set_rss_config(Some(&rss), 1);
        (env, rss)
    })
}

#[test]
fn syn_samples_predict_the_same_queue_as_the_model() {
    skip_if!(missing_bpf_rights());
    for (env, rss) in start_test_envs() {
        let listener = env.listen_at_vip();
        let connections: Vec<_> = (0..CONNECTION_COUNT).map(|_| env.open_connection(&listener)).collect();
        let client_addresses: BTreeSet<SocketAddr> =
            connections.iter().map(|(client, _)| client.local_addr().unwrap()).collect();
        // The client's device has several queues. The kernel records no queue for SYNs from the first queue.
        let syn_samples = env.programs.syn_samples_after_sequence(0);
        assert!(syn_samples.len() >= CONNECTION_COUNT / 4, "{} samples", syn_samples.len());
        for sample in &syn_samples {
            let to_socket_address = |address, port| SocketAddr::new(address_from_words(address), u16::from_be(port));
            let client = to_socket_address(sample.source_address, sample.source_port);
            assert!(client_addresses.contains(&client), "{client}");
            assert_eq!(to_socket_address(sample.destination_address, sample.destination_port), vip_address(env.family));
            let expected_hash =
                rss.key.toeplitz_hash(&FourTuple::new(client, vip_address(env.family)).unwrap().bytes());
            let hash_and_queue = (sample.hash, sample.predicted_queue);
            assert_eq!(
                hash_and_queue,
                (expected_hash, rss.indirection_table.queue_for_hash(expected_hash)),
                "{client} {:?}",
                rss.key.input_transform()
            );
        }
        let match_counts =
            [intf::SERVER_COUNTER_RSS_MATCHED, intf::SERVER_COUNTER_RSS_MISMATCHED].map(|c| env.server_counter(c));
        assert_eq!(match_counts.iter().sum::<u64>(), syn_samples.len() as u64);
    }
}

fn bind_reuseport_listeners(env: &ServerTestEnv) -> Vec<TcpListener> {
    let socket_domain = if env.family == AddressFamily::Ipv4 { Domain::IPV4 } else { Domain::IPV6 };
    let bind_listener = || {
        let socket = Socket::new(socket_domain, Type::STREAM, None).unwrap();
        socket.set_reuse_port(true).unwrap();
        socket.bind(&vip_address(env.family).into()).unwrap();
        socket.listen(64).unwrap();
        SockRef::from(&socket).set_read_timeout(Some(SOCKET_TIMEOUT)).unwrap();
        socket.into()
    };
    env.veth_pair.server.run_in_namespace(|| (0..QUEUE_COUNT).map(|_| bind_listener()).collect())
}

#[test]
fn connections_reach_the_socket_of_their_receive_queue() {
    skip_if!(missing_bpf_rights());
    for (env, rss) in start_test_envs() {
        let listeners = bind_reuseport_listeners(&env);
        let steer_program =
            ConnectionSteeringProgram::load(&env.pins.path(), "service", env.programs.rss_map_fd()).unwrap();
        let slots: Vec<_> =
            listeners.iter().map(|socket| steer_program.add_listening_socket(socket.as_fd()).ok()).collect();
        steer_program.set_socket_slots_by_queue(&slots);
        steer_program.attach_to_socket_group(listeners[0].as_fd()).unwrap();
        for _ in 0..CONNECTION_COUNT {
            let client = env.connect_client();
            let client_address = client.local_addr().unwrap();
            let expected_hash =
                rss.key.toeplitz_hash(&FourTuple::new(client_address, vip_address(env.family)).unwrap().bytes());
            let expected_queue = usize::from(rss.indirection_table.queue_for_hash(expected_hash));
            assert_eq!(listeners[expected_queue].accept().unwrap().1, client_address);
        }
        assert_eq!(steer_program.counters()[intf::STEER_COUNTER_STEERED as usize], CONNECTION_COUNT as u64);
    }
}
