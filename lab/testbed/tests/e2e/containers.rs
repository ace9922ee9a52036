//! Services whose workers are containers behind a bridge and DNAT, so that the servers have no socket for any
//! connection.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};

use coreward_model::consistency::{ConsistencyMode, CookieStamper};
use coreward_testbed::addresses::SERVICE_ADDRESS;
use coreward_testbed::container::{CONTAINER_RESPONSE_BODY, ServiceContainer};
use coreward_testbed::fleet::{ServerAdminState, TestbedFleetOptions};
use coreward_testbed::{DEFAULT_WAIT_TIMEOUT, TestbedOptions, find_missing_testbed_rights, skip_if};

use crate::support::{FleetTestEnv, assert_eventually};

/// Number of connections in a test. With this number, the probability that no connection is in a bucket of the third
/// server is below 10^-10 ((2/3)^60).
const CONNECTION_COUNT: usize = 60;

struct ContainerEnv {
    _containers: Vec<ServiceContainer>,
    env: FleetTestEnv,
}

impl ContainerEnv {
    fn start(instance: &str, options: TestbedFleetOptions) -> Self {
        let testbed_options =
            TestbedOptions { instance_name: instance.to_owned(), server_count: 3, ..TestbedOptions::default() };
        let env =
            FleetTestEnv::start(testbed_options, TestbedFleetOptions { policy_name: "hash".to_owned(), ..options });
        let start_container = |server| {
            let container = env.testbed.start_container(server).unwrap();
            container.set_sysctl(&env.testbed, "net.ipv4.tcp_timestamps", 2).unwrap();
            container
        };
        let running_containers = (1..=3).map(start_container).collect();
        let container_env = Self { _containers: running_containers, env };
        assert_eventually(*DEFAULT_WAIT_TIMEOUT, "every container answers", || {
            (0..20).all(|_| container_env.query_container().is_ok())
        });
        container_env
    }

    fn set_client_timestamps(&self, value: &str) {
        self.env.testbed.client().set_sysctls(&[("ipv4/tcp_timestamps", value)]).unwrap();
    }

    /// Opens a connection to the service, sends one request, and asserts that a container answers it.
    fn query_container(&self) -> anyhow::Result<()> {
        self.env.testbed.client().run_within(|| {
            let mut stream = TcpStream::connect_timeout(&SocketAddr::from(SERVICE_ADDRESS), *DEFAULT_WAIT_TIMEOUT)?;
            stream.set_read_timeout(Some(*DEFAULT_WAIT_TIMEOUT))?;
            stream.write_all(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")?;
            let mut response_text = String::new();
            stream.read_to_string(&mut response_text)?;
            assert!(response_text.ends_with(CONTAINER_RESPONSE_BODY), "{response_text:?}");
            Ok(())
        })
    }

    /// Opens [`CONNECTION_COUNT`] connections with one request each, and returns the errors of those that fail.
    fn collect_connection_errors(&self) -> Vec<anyhow::Error> {
        (0..CONNECTION_COUNT).filter_map(|_| self.query_container().err()).collect()
    }

    /// Removes server 3 and adds it again, which moves a third of the buckets to it.
    fn move_buckets_to_third_server(&mut self) {
        self.env.set_admin_state(3, None);
        self.env.set_admin_state(3, Some(ServerAdminState::Active));
    }

    fn has_warning(&self, warning_text: &str) -> bool {
        let status = self.env.fleet.query_status(&self.env.testbed).unwrap();
        status["servers"].to_string().contains(warning_text)
    }
}

#[test]
fn connections_to_containers_survive_a_bucket_change() {
    skip_if!(find_missing_testbed_rights());
    let mut container_env = ContainerEnv::start("dnat", TestbedFleetOptions::default());
    for timestamps in ["0", "1"] {
        container_env.set_client_timestamps(timestamps);
        container_env.move_buckets_to_third_server();
        let connection_errors = container_env.collect_connection_errors();
        assert!(
            connection_errors.is_empty(),
            "tcp_timestamps {timestamps}: {} of {CONNECTION_COUNT}: {}",
            connection_errors.len(),
            connection_errors[0]
        );
    }
    assert!(!container_env.has_warning("another network namespace"), "all works");
}

#[test]
fn modes_that_need_host_sockets_are_reported_for_containers() {
    skip_if!(find_missing_testbed_rights());
    let modes_and_warnings = [
        ("dnatbeamer", ConsistencyMode::Beamer, CookieStamper::Server, "bucket changes hands (`consistency"),
        ("dnatoff", ConsistencyMode::Stateless, CookieStamper::Off, "connections without a flow-table entry"),
        ("dnattable", ConsistencyMode::Stateful, CookieStamper::Server, "connections are stateless"),
    ];
    for (instance, consistency, timestamps, warning) in modes_and_warnings {
        let mut container_env = ContainerEnv::start(
            instance,
            TestbedFleetOptions { consistency, timestamps, ..TestbedFleetOptions::default() },
        );
        container_env.move_buckets_to_third_server();
        let connection_errors = container_env.collect_connection_errors();
        assert!(
            connection_errors.is_empty(),
            "{instance}: {} of {CONNECTION_COUNT}: {}",
            connection_errors.len(),
            connection_errors[0]
        );
        assert_eventually(*DEFAULT_WAIT_TIMEOUT, warning, || container_env.has_warning(warning));
        if consistency == ConsistencyMode::Stateful {
            assert_eventually(*DEFAULT_WAIT_TIMEOUT, "cookies hold ids", || {
                container_env.env.sum_lb_counter("established") > 0
            });
            assert_eq!(container_env.env.sum_lb_counter("connection_table"), 0, "an index could not be restored");
        }
    }
}
