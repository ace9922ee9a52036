//! Tests the steering of an unmodified nginx that was started before the agent, on a testbed server.

use coreward_agent::agent::Agent;
use coreward_model::FourTuple;
use coreward_model::rss::{RssConfig, RssInputTransform};
use coreward_testbed::addresses::SERVICE_ADDRESS;
use coreward_testbed::nginx::{NginxServer, WORKER_IDENTITY_PATH};
use coreward_testbed::rss_emulation::{read_rss_registers, shift_established_connection_queues, write_rss_registers};
use coreward_testbed::{Testbed, find_missing_testbed_rights, skip_if};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::support::{
    CORE_COUNT, agent_config, create_testbed, http_get, reported_counter, test_agent_configuration, wait_until,
};

/// Checks that the worker of each queue answers eight requests. Their source ports begin at `first_port`.
fn check_worker_of_each_queue(testbed: &Testbed, first_port: u16, worker_pids: &[u32]) -> anyhow::Result<()> {
    let emulated_rss = read_rss_registers(&testbed.emulated_rss_pin_path(1))?;
    let mut requests_by_queue = [0; CORE_COUNT as usize];
    for port in first_port..first_port + 1_000 {
        let four_tuple = FourTuple::new((testbed.client_address(0), port).into(), SERVICE_ADDRESS.into())?;
        let queue = usize::from(
            emulated_rss.indirection_table.queue_for_hash(emulated_rss.key.toeplitz_hash(&four_tuple.bytes())),
        );
        if requests_by_queue[queue] == 8 {
            continue;
        }
        let answer = http_get(testbed, WORKER_IDENTITY_PATH, port)?;
        assert_eq!(answer.trim(), format!("1 {}", worker_pids[queue]), "port {port}, queue {queue} of {worker_pids:?}");
        requests_by_queue[queue] += 1;
    }
    assert_eq!(requests_by_queue, [8; CORE_COUNT as usize], "the ports do not use all queues");
    Ok(())
}

/// Waits until nginx has `worker_count` workers. Returns their process ids in the order of their starts, as the kernel
/// lists the children. Sorting the ids would not suffice, because process ids may wrap.
fn wait_for_workers(nginx: &NginxServer, worker_count: usize) -> anyhow::Result<Vec<u32>> {
    wait_until("the workers", || Ok(nginx.worker_pids().len() == worker_count))?;
    Ok(nginx.worker_pids())
}

fn run_maintenance_until_steered(agent: &mut Agent) -> anyhow::Result<()> {
    wait_until("a worker for every socket", || {
        agent.run_maintenance();
        Ok(!agent
            .maintenance_warnings()
            .iter()
            .any(|warning| warning.contains("worker") || warning.contains("steered")))
    })
}

#[test]
fn steering_survives_nginx_reload_worker_respawn_and_agent_restart() -> anyhow::Result<()> {
    skip_if!(find_missing_testbed_rights(), Ok(()));
    let testbed = create_testbed("tsteer")?;
    let nginx = testbed.start_nginx(1)?;
    testbed.server(1)?.run_within(|| {
        let mut agent = Agent::start(agent_config(&testbed))?;
        agent.apply_configuration(test_agent_configuration(), &[]);
        run_maintenance_until_steered(&mut agent)?;
        let first_worker_pids = wait_for_workers(&nginx, 4)?;
        check_worker_of_each_queue(&testbed, 20_000, &first_worker_pids)?;
        assert_eq!((reported_counter(&mut agent, "steered"), reported_counter(&mut agent, "no_worker")), (32, 0));

        // If a worker dies, its socket waits for the worker that replaces it.
        kill(Pid::from_raw(first_worker_pids[1] as i32), Signal::SIGKILL)?;
        wait_until("another worker", || {
            Ok(nginx.worker_pids().len() == 4 && !nginx.worker_pids().contains(&first_worker_pids[1]))
        })?;
        run_maintenance_until_steered(&mut agent)?;
        let current_worker_pids = nginx.worker_pids();
        let respawned_pid =
            *current_worker_pids.iter().find(|pid| !first_worker_pids.contains(pid)).expect("another worker");
        check_worker_of_each_queue(
            &testbed,
            21_000,
            &[first_worker_pids[0], respawned_pid, first_worker_pids[2], first_worker_pids[3]],
        )?;

        // Nothing changes if the agent is killed and another one is started.
        drop(agent);
        check_worker_of_each_queue(
            &testbed,
            22_000,
            &[first_worker_pids[0], respawned_pid, first_worker_pids[2], first_worker_pids[3]],
        )?;
        let mut agent = Agent::start(agent_config(&testbed))?;
        assert_eq!(reported_counter(&mut agent, "steered"), 96, "before it knows the service");
        agent.apply_configuration(test_agent_configuration(), &[]);
        run_maintenance_until_steered(&mut agent)?;
        check_worker_of_each_queue(
            &testbed,
            23_000,
            &[first_worker_pids[0], respawned_pid, first_worker_pids[2], first_worker_pids[3]],
        )?;

        // The same number of workers takes over the sockets, then fewer, and then more.
        for (round, count) in [4usize, 3, 6].into_iter().enumerate() {
            let previous_worker_pids = nginx.worker_pids();
            nginx.reload_configuration(&testbed, 1, count as u16)?;
            wait_until("new workers", || {
                Ok(!nginx.worker_pids().iter().any(|pid| previous_worker_pids.contains(pid)))
            })?;
            let current_worker_pids = wait_for_workers(&nginx, count)?;
            run_maintenance_until_steered(&mut agent)?;
            let expected_worker_pids: Vec<u32> =
                (0..usize::from(CORE_COUNT)).map(|queue| current_worker_pids[queue % count]).collect();
            check_worker_of_each_queue(&testbed, 24_000 + round as u16 * 1000, &expected_worker_pids)?;
        }
        assert_eq!(reported_counter(&mut agent, "no_worker"), 0);
        agent.detach_programs()?;

        // The next agent must be able to take over all sockets.
        let mut agent = Agent::start(agent_config(&testbed))?;
        agent.apply_configuration(test_agent_configuration(), &[]);
        run_maintenance_until_steered(&mut agent)?;
        check_worker_of_each_queue(&testbed, 27_000, &wait_for_workers(&nginx, 6)?)?;
        agent.detach_programs()
    })
}

/// Tests a NIC that hashes symmetrically but does not report it, like mlx5 before Linux 6.15.
#[test]
fn unreported_symmetric_hash_is_detected_from_queues_of_syns() -> anyhow::Result<()> {
    skip_if!(find_missing_testbed_rights(), Ok(()));
    let testbed = create_testbed("tsymmetric")?;
    let nginx = testbed.start_nginx(1)?;
    testbed.server(1)?.run_within(|| {
        let mut agent = Agent::start(agent_config(&testbed))?;
        agent.apply_configuration(test_agent_configuration(), &[]);
        run_maintenance_until_steered(&mut agent)?;
        let worker_pids = wait_for_workers(&nginx, 4)?;
        let mut port = 20_000;
        for input in [RssInputTransform::SymmetricOrXor, RssInputTransform::SymmetricXor, RssInputTransform::None] {
            let current_rss = read_rss_registers(&testbed.emulated_rss_pin_path(1))?;
            let changed_rss = RssConfig { key: current_rss.key.with_input_transform(input), ..current_rss };
            write_rss_registers(&testbed.emulated_rss_pin_path(1), &changed_rss)?;
            wait_until("the agent knows what the NIC hashes by", || {
                http_get(&testbed, WORKER_IDENTITY_PATH, port)?;
                port += 1;
                agent.run_maintenance();
                Ok(agent.rss_config() == Some(&changed_rss))
            })?;
            let initial_mismatch_count = reported_counter(&mut agent, "rss_mismatched");
            check_worker_of_each_queue(&testbed, port, &worker_pids)?;
            port += 1_000;
            agent.run_maintenance();
            assert_eq!(reported_counter(&mut agent, "rss_mismatched"), initial_mismatch_count, "{}", input.name());
            let has_warning = agent.maintenance_warnings().iter().any(|warning| warning.contains("not in force"));
            assert!(!has_warning, "{:?}", agent.maintenance_warnings());
        }
        agent.detach_programs()
    })
}

/// Tests a NIC that moves open connections to other queues, as the flow director of ixgbe and i40e does.
#[test]
fn nic_that_moves_open_connections_causes_warning() -> anyhow::Result<()> {
    skip_if!(find_missing_testbed_rights(), Ok(()));
    let testbed = create_testbed("tmoves")?;
    let _nginx = testbed.start_nginx(1)?;
    testbed.server(1)?.run_within(|| {
        let mut agent = Agent::start(agent_config(&testbed))?;
        agent.apply_configuration(test_agent_configuration(), &[]);
        let has_warning = |agent: &Agent| {
            agent.maintenance_warnings().iter().any(|warning| warning.contains("moves open connections"))
        };
        let mut port = 20_000;
        let mut request_until = |agent: &mut Agent, condition_name: &str, expected: bool| {
            wait_until(condition_name, || {
                // Several requests are sent, because only one packet in many is sampled.
                for _ in 0..16 {
                    http_get(&testbed, WORKER_IDENTITY_PATH, port)?;
                    port += 1;
                }
                agent.run_maintenance();
                let sampled_packet_count = reported_counter(agent, "rss_established_matched")
                    + reported_counter(agent, "rss_established_mismatched");
                Ok(sampled_packet_count >= 20 && has_warning(agent) == expected)
            })
        };
        request_until(&mut agent, "open connections are sampled", false)?;
        shift_established_connection_queues(&testbed.emulated_rss_pin_path(1), 1)?;
        request_until(&mut agent, "the agent warns", true)?;
        assert!(
            !agent.maintenance_warnings().iter().any(|warning| warning.contains("not in force")),
            "{:?}",
            agent.maintenance_warnings()
        );
        shift_established_connection_queues(&testbed.emulated_rss_pin_path(1), 0)?;
        request_until(&mut agent, "it has ended", false)?;
        agent.detach_programs()
    })
}
