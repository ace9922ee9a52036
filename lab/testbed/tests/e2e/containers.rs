//! Services whose workers are containers behind a bridge and DNAT: the servers have no socket of any connection.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};

use coreward_model::consistency::{Consistency, Timestamps};
use coreward_testbed::addresses::SERVICE_ADDRESS;
use coreward_testbed::container::{CONTAINER_RESPONSE, Container};
use coreward_testbed::fleet::{AdminState, FleetOptions};
use coreward_testbed::{TIMEOUT, TestbedOptions, missing_testbed_rights, skip_if};

use crate::support::{TestEnv, eventually};

/// Number of connections. All of them miss the buckets of a third server once in 10^10 runs: (2/3)^60.
const CONNECTION_COUNT: usize = 60;

struct Containers {
    _containers: Vec<Container>,
    env: TestEnv,
}

impl Containers {
    fn start(instance: &str, options: FleetOptions) -> Self {
        let testbed = TestbedOptions { instance: instance.to_owned(), servers: 3, ..TestbedOptions::default() };
        let env = TestEnv::start(testbed, FleetOptions { policy: "hash".to_owned(), ..options });
        let start = |server| {
            let container = env.testbed.start_container(server).unwrap();
            container.set_sysctl(&env.testbed, "net.ipv4.tcp_timestamps", 2).unwrap();
            container
        };
        let containers = (1..=3).map(start).collect();
        let containers = Self { _containers: containers, env };
        eventually(*TIMEOUT, "every container answers", || (0..20).all(|_| containers.query_worker().is_ok()));
        containers
    }

    fn set_client_timestamps(&self, value: &str) {
        self.env.testbed.client().set_sysctls(&[("ipv4/tcp_timestamps", value)]).unwrap();
    }

    /// Opens a connection to the service, sends one request, and asserts that a container answers it.
    fn query_worker(&self) -> anyhow::Result<()> {
        self.env.testbed.client().within(|| {
            let mut stream = TcpStream::connect_timeout(&SocketAddr::from(SERVICE_ADDRESS), *TIMEOUT)?;
            stream.set_read_timeout(Some(*TIMEOUT))?;
            stream.write_all(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")?;
            let mut answer = String::new();
            stream.read_to_string(&mut answer)?;
            assert!(answer.ends_with(CONTAINER_RESPONSE), "{answer:?}");
            Ok(())
        })
    }

    /// Opens [`CONNECTION_COUNT`] connections with one request each, and returns the errors.
    fn broken(&self) -> Vec<anyhow::Error> {
        (0..CONNECTION_COUNT).filter_map(|_| self.query_worker().err()).collect()
    }

    /// Removes server 3 and adds it again, which moves a third of the buckets to it.
    fn move_buckets(&mut self) {
        self.env.set_admin_state(3, None);
        self.env.set_admin_state(3, Some(AdminState::Active));
    }

    fn has_warning(&self, words: &str) -> bool {
        let status = self.env.fleet.status(&self.env.testbed).unwrap();
        status["servers"].to_string().contains(words)
    }
}

#[test]
fn container_connections_survive_a_bucket_change() {
    skip_if!(missing_testbed_rights());
    let mut containers = Containers::start("dnat", FleetOptions::default());
    for timestamps in ["0", "1"] {
        containers.set_client_timestamps(timestamps);
        containers.move_buckets();
        let broken = containers.broken();
        assert!(
            broken.is_empty(),
            "tcp_timestamps {timestamps}: {} of {CONNECTION_COUNT}: {}",
            broken.len(),
            broken[0]
        );
    }
    assert!(!containers.has_warning("another network namespace"), "all works");
}

#[test]
fn modes_that_need_sockets_are_reported_for_containers() {
    skip_if!(missing_testbed_rights());
    let cases = [
        ("dnatbeamer", Consistency::Beamer, Timestamps::Server, "bucket changes hands (`consistency"),
        ("dnatoff", Consistency::Stateless, Timestamps::Off, "connections without a flow-table entry"),
        ("dnattable", Consistency::Stateful, Timestamps::Server, "connections are stateless"),
    ];
    for (instance, consistency, timestamps, warning) in cases {
        let mut containers =
            Containers::start(instance, FleetOptions { consistency, timestamps, ..FleetOptions::default() });
        containers.move_buckets();
        let broken = containers.broken();
        assert!(broken.is_empty(), "{instance}: {} of {CONNECTION_COUNT}: {}", broken.len(), broken[0]);
        eventually(*TIMEOUT, warning, || containers.has_warning(warning));
        if consistency == Consistency::Stateful {
            eventually(*TIMEOUT, "cookies hold ids", || containers.env.sum_counter("established") > 0);
            assert_eq!(containers.env.sum_counter("connection_table"), 0, "an index could not be restored");
        }
    }
}
