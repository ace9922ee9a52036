//! Tests of `coreward certs` commands that a crash interrupts.

use super::*;

/// Interrupts each step of a roll-over after every change of a file. Issued certificates are then valid, or the error
/// names the remedy. Only the interrupted step can be executed next, and completes what is missing.
#[tokio::test]
async fn interrupted_rollover_step_is_completed_by_the_same_command() {
    const ROLLOVER_STEPS: [AuthorityRolloverStep; 3] =
        [AuthorityRolloverStep::Begin, AuthorityRolloverStep::Switch, AuthorityRolloverStep::Finish];
    for (position, interrupted) in ROLLOVER_STEPS.into_iter().enumerate() {
        let mut change_count = 0;
        loop {
            let rollover_test = RolloverTest::start().await;
            for step in &ROLLOVER_STEPS[..position] {
                rollover_test.execute_rollover_step(*step).await;
            }
            let step_result = interruption::run_with_interrupt_after_changes(change_count, || {
                rollover_test.fleet.authority.perform_rollover_step(interrupted, 30 * DAY)
            });
            let Err(error) = step_result else { break };
            let at = format!("{interrupted:?} after {change_count} changes");
            assert!(format!("{error:#}").contains("interrupted"), "{at}: {error:#}");
            match rollover_test.fleet.try_issue_certificate_bundle(
                FleetRole::Agent,
                "s1",
                CertificateValidity::from_now(DAY),
            ) {
                Ok(_) => rollover_test.assert_mutual_trust(&at).await,
                Err(error) => {
                    assert!(error.to_string().contains("`coreward certs roll-over switch` again"), "{at}: {error}")
                }
            }
            for other in ROLLOVER_STEPS.into_iter().filter(|step| *step != interrupted) {
                assert!(
                    rollover_test.fleet.authority.perform_rollover_step(other, 30 * DAY).is_err(),
                    "{at}: {other:?} is rejected"
                );
            }
            for step in &ROLLOVER_STEPS[position..] {
                rollover_test.execute_rollover_step(*step).await;
            }
            change_count += 1;
        }
        assert!(change_count > 1, "{interrupted:?} changes {change_count} files");
    }
}

#[test]
fn interrupted_init_is_completed_by_the_same_command() {
    let init_authority = |directory: &Path| CertificateAuthority::init(directory, &"prod".parse().unwrap(), DAY);
    for changes in 0.. {
        let directory = tempfile::tempdir().unwrap();
        if interruption::run_with_interrupt_after_changes(changes, || init_authority(directory.path())).is_ok() {
            return assert!(changes > 2);
        }
        assert!(CertificateAuthority::open(directory.path()).is_err(), "after {changes} changes");
        let identity =
            FleetIdentity { fleet: "prod".parse().unwrap(), role: FleetRole::Lb, name: "lb1".parse().unwrap() };
        init_authority(directory.path())
            .unwrap()
            .issue_certificate(&identity, &[], CertificateValidity::from_now(DAY / 2))
            .unwrap();
    }
}

/// Controller and agent of a test that replaces the certificate authority.
struct RolloverTest {
    fleet: TestFleet,
    controller_credentials: Arc<ReloadableTlsCredentials>,
    agent_credentials: Arc<ReloadableTlsCredentials>,
    listener: TestListener,
}

impl RolloverTest {
    async fn start() -> Self {
        let fleet = TestFleet::new("prod");
        let (controller, agent) = (
            fleet.issue_and_load_credentials(FleetRole::Controller, "c1"),
            fleet.issue_and_load_credentials(FleetRole::Agent, "s1"),
        );
        let listener = TestListener::start(Some(controller.clone()), AcceptorLimits::default()).await;
        Self { fleet, controller_credentials: controller, agent_credentials: agent, listener }
    }

    /// Executes a step of the authority's replacement, and distributes the files that the step wrote.
    async fn execute_rollover_step(&self, step: AuthorityRolloverStep) {
        self.fleet
            .authority
            .perform_rollover_step(step, 30 * DAY)
            .unwrap_or_else(|error| panic!("{step:?}: {error:#}"));
        self.fleet.issue_certificate_bundle(FleetRole::Agent, "s1", CertificateValidity::from_now(DAY));
        self.assert_mutual_trust(&format!("{step:?}: the agent first")).await;
        self.fleet.issue_certificate_bundle(FleetRole::Controller, "c1", CertificateValidity::from_now(DAY));
        self.controller_credentials.reload_credentials().unwrap();
        self.assert_mutual_trust(&format!("{step:?}: both")).await;
    }

    /// Asserts that the agent and the controller trust each other after the agent has reloaded its files.
    async fn assert_mutual_trust(&self, point_in_time: &str) {
        self.agent_credentials.reload_credentials().unwrap();
        assert_eq!(
            self.listener.connect_and_read_answer(&self.agent_credentials).await.as_deref(),
            Ok("agent s1"),
            "{point_in_time}"
        );
    }
}
