from tests.transports.mutants.harness import HubConformance


class TestHub(HubConformance):
    pass
