use coreward_tls::certificate::CertificateFingerprint;

use super::*;
use coreward_store::embedded::EmbeddedStore;

fn open_manager(directory: &Path, fleet_text: &str) -> anyhow::Result<FleetStateManager> {
    let [path, file, store] = ["controller.toml", "fleet.toml", "store"].map(|name| directory.join(name));
    std::fs::write(&path, format!("listen = \"127.0.0.1:0\"\nstore = {store:?}\nfleet = {file:?}\n")).unwrap();
    std::fs::write(&file, fleet_text).unwrap();
    let config = ControllerConfig::load(&path).unwrap();
    FleetStateManager::open(&path, config, RevocationList::default(), || {
        Ok(FleetStore::Embedded(EmbeddedStore::open(&store)?))
    })
}

fn is_fleet_file_rejected(manager: &FleetStateManager) -> bool {
    manager.state_counters().is_fleet_file_rejected.load(Ordering::Relaxed)
}

#[test]
fn invalid_fleet_file_does_not_prevent_a_restart() {
    let directory = tempfile::tempdir().unwrap();
    let invalid_fleet_text = "load_ewma_alpha = 7\n";
    assert!(open_manager(directory.path(), invalid_fleet_text).is_err());
    assert!(!directory.path().join("store").exists(), "nothing is left behind");
    let mut first_manager = open_manager(directory.path(), "load_ewma_alpha = 0.25\n").unwrap();
    assert!(!is_fleet_file_rejected(&first_manager));
    assert_eq!(first_manager.state_counters().warnings(), [""; 0]);
    std::fs::write(directory.path().join("fleet.toml"), invalid_fleet_text).unwrap();
    assert!(first_manager.apply_change(FleetRecordChange::ReloadFleetFile, &FleetChangeAuthor::sighup()).is_err());
    assert!(is_fleet_file_rejected(&first_manager));
    assert!(first_manager.state_counters().warnings()[0].starts_with("the fleet's file is wrong"));
    first_manager.state_counters().is_store_writable.store(false, Ordering::Relaxed);
    assert!(first_manager.state_counters().warnings()[0].starts_with("the store cannot be written"));
    drop(first_manager);
    let mut second_manager = open_manager(directory.path(), invalid_fleet_text).unwrap();
    assert_eq!(
        (&*second_manager.fleet().document.text, is_fleet_file_rejected(&second_manager)),
        ("load_ewma_alpha = 0.25\n", true)
    );
    std::fs::write(directory.path().join("fleet.toml"), "load_ewma_alpha = 0.75\n").unwrap();
    second_manager.apply_change(FleetRecordChange::ReloadFleetFile, &FleetChangeAuthor::sighup()).unwrap();
    assert_eq!(
        (&*second_manager.fleet().document.text, is_fleet_file_rejected(&second_manager)),
        ("load_ewma_alpha = 0.75\n", false)
    );
}

#[test]
fn reload_revokes_certificates_despite_an_invalid_fleet_file() {
    let directory = tempfile::tempdir().unwrap();
    let [path, fleet, store] = ["controller.toml", "fleet.toml", "store"].map(|name| directory.path().join(name));
    let config_text = format!("listen = \"127.0.0.1:0\"\nstore = {store:?}\nfleet = {fleet:?}\n");
    std::fs::write(&path, &config_text).unwrap();
    std::fs::write(&fleet, "load_ewma_alpha = 0.5").unwrap();
    let revoked_certificates = RevocationList::default();
    let open_store = || Ok(FleetStore::Embedded(EmbeddedStore::open(&store)?));
    let mut manager = FleetStateManager::open(
        &path,
        ControllerConfig::load(&path).unwrap(),
        revoked_certificates.clone(),
        open_store,
    )
    .unwrap();
    let fingerprint = "AB".repeat(32);
    std::fs::write(&path, format!("revoked_certificates = [\"{fingerprint}\"]\n{config_text}")).unwrap();
    std::fs::write(&fleet, "load_ewma_alpha = 7").unwrap();
    assert!(manager.apply_change(FleetRecordChange::ReloadFleetFile, &FleetChangeAuthor::sighup()).is_err());
    assert!(revoked_certificates.contains(&fingerprint.parse::<CertificateFingerprint>().unwrap()));
}
