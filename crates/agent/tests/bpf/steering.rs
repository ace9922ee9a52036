//! Steering of a stock nginx that was started before the agent, on a testbed's server.

use coreward_agent::agent::Agent;
use coreward_model::FourTuple;
use coreward_model::rss::{InputTransform, RssConfig};
use coreward_testbed::addresses::SERVICE_ADDRESS;
use coreward_testbed::nginx::{Nginx, WORKER_PATH};
use coreward_testbed::rss_emulation::{move_established, read_registers, write_registers};
use coreward_testbed::{Testbed, missing_testbed_rights, skip_if};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::support::{CORE_COUNT, config, configuration, counter, get, testbed, wait_until};

/// Sends requests from 32 ports from `first_port` on, 8 to each receive queue, which `workers[queue]` must answer.
fn check_served_by(testbed: &Testbed, first_port: u16, workers: &[u32]) -> anyhow::Result<()> {
    let rss = read_registers(&testbed.emulated_rss_path(1))?;
    let mut requests = [0; CORE_COUNT as usize];
    for port in first_port..first_port + 1_000 {
        let tuple = FourTuple::new((testbed.client_address(0), port).into(), SERVICE_ADDRESS.into())?;
        let queue = usize::from(rss.indirection_table.queue(rss.key.toeplitz(&tuple.bytes())));
        if requests[queue] == 8 {
            continue;
        }
        let answer = get(testbed, WORKER_PATH, port)?;
        assert_eq!(answer.trim(), format!("1 {}", workers[queue]), "port {port}, queue {queue} of {workers:?}");
        requests[queue] += 1;
    }
    assert_eq!(requests, [8; CORE_COUNT as usize], "the ports do not use all queues");
    Ok(())
}

/// Waits until there are `count` workers. Returns their process ids in the order of their start, which is the kernel's
/// order of children. (Process ids may wrap, so that they are not always in this order.)
fn workers(nginx: &Nginx, count: usize) -> anyhow::Result<Vec<u32>> {
    wait_until("the workers", || Ok(nginx.workers().len() == count))?;
    Ok(nginx.workers())
}

/// Runs the agent's maintenance until every socket has a worker again.
fn poll_until_steered(agent: &mut Agent) -> anyhow::Result<()> {
    wait_until("a worker for every socket", || {
        agent.maintain();
        Ok(!agent.warnings().iter().any(|warning| warning.contains("worker") || warning.contains("steered")))
    })
}

#[test]
fn nginx_stays_steered_through_reload_respawn_and_agent_restart() -> anyhow::Result<()> {
    skip_if!(missing_testbed_rights(), Ok(()));
    let testbed = testbed("tsteer")?;
    let nginx = testbed.start_nginx(1)?;
    testbed.server(1)?.within(|| {
        let mut agent = Agent::start(config(&testbed))?;
        agent.configure(configuration(), &[]);
        poll_until_steered(&mut agent)?;
        let first = workers(&nginx, 4)?;
        check_served_by(&testbed, 20_000, &first)?;
        assert_eq!((counter(&mut agent, "steered"), counter(&mut agent, "no_worker")), (32, 0));

        // A worker dies; its socket waits for the one that takes its place.
        kill(Pid::from_raw(first[1] as i32), Signal::SIGKILL)?;
        wait_until("another worker", || Ok(nginx.workers().len() == 4 && !nginx.workers().contains(&first[1])))?;
        poll_until_steered(&mut agent)?;
        let now = nginx.workers();
        let respawned = *now.iter().find(|pid| !first.contains(pid)).expect("another worker");
        check_served_by(&testbed, 21_000, &[first[0], respawned, first[2], first[3]])?;

        // The agent is killed and another one started: nothing changes.
        drop(agent);
        check_served_by(&testbed, 22_000, &[first[0], respawned, first[2], first[3]])?;
        let mut agent = Agent::start(config(&testbed))?;
        assert_eq!(counter(&mut agent, "steered"), 96, "before it knows the service");
        agent.configure(configuration(), &[]);
        poll_until_steered(&mut agent)?;
        check_served_by(&testbed, 23_000, &[first[0], respawned, first[2], first[3]])?;

        // Other workers with the same sockets, then fewer, then more.
        for (round, count) in [4usize, 3, 6].into_iter().enumerate() {
            let before = nginx.workers();
            nginx.reload(&testbed, 1, count as u16)?;
            wait_until("new workers", || Ok(!nginx.workers().iter().any(|pid| before.contains(pid))))?;
            let now = workers(&nginx, count)?;
            poll_until_steered(&mut agent)?;
            let expected: Vec<u32> = (0..usize::from(CORE_COUNT)).map(|queue| now[queue % count]).collect();
            check_served_by(&testbed, 24_000 + round as u16 * 1000, &expected)?;
        }
        assert_eq!(counter(&mut agent, "no_worker"), 0);
        agent.detach()?;

        // Nothing is left that would keep the sockets from the next agent.
        let mut agent = Agent::start(config(&testbed))?;
        agent.configure(configuration(), &[]);
        poll_until_steered(&mut agent)?;
        check_served_by(&testbed, 27_000, &workers(&nginx, 6)?)?;
        agent.detach()
    })
}

/// Tests a NIC that hashes symmetrically without reporting it, like mlx5, whose driver reports it since Linux 6.15.
#[test]
fn unreported_symmetric_hash_is_recognised_by_queues_of_syns() -> anyhow::Result<()> {
    skip_if!(missing_testbed_rights(), Ok(()));
    let testbed = testbed("tsymmetric")?;
    let nginx = testbed.start_nginx(1)?;
    testbed.server(1)?.within(|| {
        let mut agent = Agent::start(config(&testbed))?;
        agent.configure(configuration(), &[]);
        poll_until_steered(&mut agent)?;
        let workers = workers(&nginx, 4)?;
        let mut port = 20_000;
        for input in [InputTransform::SymmetricOrXor, InputTransform::SymmetricXor, InputTransform::None] {
            let now = read_registers(&testbed.emulated_rss_path(1))?;
            let changed = RssConfig { key: now.key.with_input(input), ..now };
            write_registers(&testbed.emulated_rss_path(1), &changed)?;
            wait_until("the agent knows what the NIC hashes by", || {
                get(&testbed, WORKER_PATH, port)?;
                port += 1;
                agent.maintain();
                Ok(agent.rss() == Some(&changed))
            })?;
            let before = counter(&mut agent, "rss_mismatched");
            check_served_by(&testbed, port, &workers)?;
            port += 1_000;
            agent.maintain();
            assert_eq!(counter(&mut agent, "rss_mismatched"), before, "{}", input.name());
            let warned = agent.warnings().iter().any(|warning| warning.contains("not in force"));
            assert!(!warned, "{:?}", agent.warnings());
        }
        agent.detach()
    })
}

/// Tests a NIC that moves connections like the flow director of ixgbe and i40e.
#[test]
fn nic_that_moves_open_connections_is_reported() -> anyhow::Result<()> {
    skip_if!(missing_testbed_rights(), Ok(()));
    let testbed = testbed("tmoves")?;
    let _nginx = testbed.start_nginx(1)?;
    testbed.server(1)?.within(|| {
        let mut agent = Agent::start(config(&testbed))?;
        agent.configure(configuration(), &[]);
        let warned = |agent: &Agent| agent.warnings().iter().any(|warning| warning.contains("moves open connections"));
        let mut port = 20_000;
        let mut wait_until = |agent: &mut Agent, what: &str, expected: bool| {
            wait_until(what, || {
                // One packet in many is sampled.
                for _ in 0..16 {
                    get(&testbed, WORKER_PATH, port)?;
                    port += 1;
                }
                agent.maintain();
                let sampled = counter(agent, "rss_established_matched") + counter(agent, "rss_established_mismatched");
                Ok(sampled >= 20 && warned(agent) == expected)
            })
        };
        wait_until(&mut agent, "open connections are sampled", false)?;
        move_established(&testbed.emulated_rss_path(1), 1)?;
        wait_until(&mut agent, "the agent warns", true)?;
        assert!(!agent.warnings().iter().any(|warning| warning.contains("not in force")), "{:?}", agent.warnings());
        move_established(&testbed.emulated_rss_path(1), 0)?;
        wait_until(&mut agent, "it has ended", false)?;
        agent.detach()
    })
}
