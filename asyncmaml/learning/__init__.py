"""What runs in the learner's thread: torch only, tensors in, tensors out.

No processes and no asyncio in here, and nothing of `asyncmaml.sampling`. Where things are:

    mlp, policies, policy_spaces, policy_files   the policies
    baseline, phases                             from episodes to advantages
    objectives, adaptation, chain                the inner update, and its derivative
    distributions, products, mlp_products,
    curvature, gauss_newton                      divergences and products with second derivatives
    conjugate_gradient, groups                   solving; tasks stacked where that is faster
    learner, learners                            the contract, and the table of what keeps to it
    maml_trpo, promp, reptile                    one meta-learner each
"""
